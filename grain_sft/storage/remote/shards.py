"""Tokens of shards in a bucket: the pieces of a whole batch in one round trip, whatever their number."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusFileError, RemoteTimeoutError
from grain_sft.storage import activity, files
from grain_sft.storage.file_stamp import DIGEST_BYTES, FileStamp, digest_of, replaced, size_change
from grain_sft.storage.remote.files import RemoteFile, RemotePiece, infos, read_pieces
from grain_sft.storage.remote.options import RemoteOptions
from grain_sft.storage.remote.requests import size_of, version_of
from grain_sft.storage.remote.retries import Limits
from grain_sft.storage.shard_cache import ShardCache

Ints = npt.NDArray[np.int64]


class RemoteShards:
    """Remote files among `shards`, of values of `itemsize` bytes. They take no descriptor; each is checked when first read."""

    def __init__(self, shards: Sequence[FileStamp], itemsize: int, options: RemoteOptions | None = None) -> None:
        self._shards, self._itemsize = shards, itemsize
        self._is_remote = np.array([files.is_remote(shard.path) for shard in shards])
        options = options or RemoteOptions.from_environment()
        self._limits, self._checked = options, dict[int, RemoteFile]()
        cache = None if options.cache is None else ShardCache(options.cache, options)
        self._read = cache.read if cache else functools.partial(read_pieces, limits=options)

    def gather(self, columns: Sequence[Ints], out: memoryview) -> list[Ints]:
        """Fill `out` with the pieces of remote files; return the columns of the pieces of local files.

        Args:
          columns: Shards, first values, offsets in the output and sizes in bytes of pieces, int64 [n] each.
        """
        remote = self._is_remote[columns[0]]
        numbers, starts, places, sizes = (each[remote & (columns[3] > 0)].tolist() for each in columns)
        if new := sorted(set(numbers) - self._checked.keys()):
            shards = [self._shards[number] for number in new]
            found = identify(shards, self._limits)
            self._check(shards, found)
            self._checked |= dict(zip(new, found, strict=True))
        wanted = []
        for shard, start, place, size in zip(numbers, starts, places, sizes, strict=True):
            offset = self._shards[shard].data_offset + start * self._itemsize
            wanted.append(RemotePiece(self._checked[shard], offset, place, size))
        self._read(wanted, out)
        activity.count("remote_bytes", sum(sizes))
        return [each[~remote] for each in columns]

    def _check(self, shards: Sequence[FileStamp], found: Sequence[RemoteFile]) -> None:
        """Check both ends of files against their stamps. They are read through the cache, so that none is fetched twice."""
        pieces, place = [], 0
        for file, shard in zip(found, shards, strict=True):
            size = min(DIGEST_BYTES, shard.size - shard.data_offset)
            for offset in (shard.data_offset, shard.size - size):
                pieces.append(RemotePiece(file, offset, place, size))
                place += size
        ends = memoryview(bytearray(place))
        try:
            self._read(pieces, ends)
        except RemoteTimeoutError:
            raise
        except CorpusFileError:
            for shard, now in zip(shards, infos([shard.path for shard in shards], self._limits), strict=True):
                _check_size(shard, now)
                if shard.version not in (None, version_of(now)):
                    raise CorpusFileError(replaced(shard)) from None
            raise
        for shard, head, tail in zip(shards, pieces[::2], pieces[1::2], strict=True):
            if digest_of(*(bytes(ends[end.place : end.place + end.size]) for end in (head, tail))) != shard.digest:
                raise CorpusFileError(replaced(shard))


def identify(shards: Sequence[FileStamp], limits: Limits) -> list[RemoteFile]:
    """Return the indexed version of each file, or the present one if the index states none."""
    unknown = [shard.path for shard in shards if shard.version is None]
    now = dict(zip(unknown, infos(unknown, limits), strict=True)) if unknown else {}
    identified = []
    for shard in shards:
        version = shard.version
        if version is None:
            _check_size(shard, now[shard.path])
            version = version_of(now[shard.path])
        fields = (shard.path, shard.size, shard.data_offset, shard.digest, version or "")
        key = hashlib.blake2b("\0".join(map(str, fields)).encode(), digest_size=16).hexdigest()
        identified.append(RemoteFile(shard.path, shard.size, key, version))
    return identified


def _check_size(shard: FileStamp, info: Mapping[str, Any]) -> None:
    if (size := size_of(shard.path, info)) != shard.size:
        raise CorpusFileError(size_change(shard, size)) from None
