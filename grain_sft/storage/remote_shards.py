"""Reader of shards in a bucket. It requests all byte ranges of a batch at once, so a batch costs one round trip."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.errors import CorpusFileError, RemoteTimeoutError
from grain_sft.storage import activity, files
from grain_sft.storage.file_stamp import DIGEST_BYTES, FileStamp, digest_of, replaced, size_change
from grain_sft.storage.remote.files import RemoteFile, RemotePiece, infos, read_pieces
from grain_sft.storage.remote.requests import size_of, version_of
from grain_sft.storage.remote.retries import Limits
from grain_sft.storage.remote_options import RemoteOptions
from grain_sft.storage.shard_cache import ShardCache
from grain_sft.types import Ints


class RemoteShards:
    """Reader of the remote files among `shards`. Each file is compared with its stamp before it is read for the first time.

    `options` is the argument `remote` of `ShardReader`.
    """

    def __init__(self, shards: Sequence[FileStamp], itemsize: int, options: RemoteOptions | None = None) -> None:
        self._shards = shards
        self._itemsize = itemsize
        self._is_remote = np.array([files.is_remote(shard.path) for shard in shards])
        self._options = options or RemoteOptions.from_environment()
        cache = None if self._options.cache is None else ShardCache(self._options.cache, self._options)
        self._read = cache.read if cache else functools.partial(read_pieces, limits=self._options)
        self._checked: dict[int, RemoteFile] = {}  # by number of the shard

    def gather(self, columns: Sequence[Ints], out: memoryview) -> list[Ints]:
        """Copy the pieces of remote files to `out`. Return the columns of the pieces of local files.

        Columns, int64 [n]: for each piece, its shard, its first value in the shard, its byte in `out`, and its size in bytes. A
        value, such as a token, has `itemsize` bytes.
        """
        shards, _, _, sizes = columns
        is_remote = self._is_remote[shards]
        remote_columns = [column[is_remote & (sizes > 0)].tolist() for column in columns]
        if unchecked := sorted(set(remote_columns[0]) - self._checked.keys()):
            new_shards = [self._shards[number] for number in unchecked]
            remote_files = identify(new_shards, self._options)
            self._check(new_shards, remote_files)
            self._checked |= dict(zip(unchecked, remote_files, strict=True))
        pieces = []
        for number, start, place, size in zip(*remote_columns, strict=True):
            offset = self._shards[number].data_offset + start * self._itemsize
            pieces.append(RemotePiece(self._checked[number], offset, place, size))
        self._read(pieces, out)
        activity.count("remote_bytes", sum(remote_columns[3]))
        return [column[~is_remote] for column in columns]

    def _check(self, shards: Sequence[FileStamp], remote_files: Sequence[RemoteFile]) -> None:
        """Raise a CorpusFileError if the first or last bytes of a file differ from its stamp."""
        pieces, place = [], 0  # for each file: the piece of its head, then the piece of its tail
        for file, shard in zip(remote_files, shards, strict=True):
            size = min(DIGEST_BYTES, shard.size - shard.data_offset)
            for offset in (shard.data_offset, shard.size - size):
                pieces.append(RemotePiece(file, offset, place, size))
                place += size
        ends = memoryview(bytearray(place))
        try:
            self._read(pieces, ends)
        except RemoteTimeoutError:  # no answer came in time, which does not mean that a file has changed
            raise
        except CorpusFileError:
            # if a file's size or version has changed, report this change, because it explains the failed read
            for shard, info in zip(shards, infos([shard.path for shard in shards], self._options), strict=True):
                _check_size(shard, info)
                if shard.version not in (None, version_of(info)):
                    raise CorpusFileError(replaced(shard)) from None
            raise
        for shard, head, tail in zip(shards, pieces[::2], pieces[1::2], strict=True):
            head_bytes, tail_bytes = (bytes(ends[end.place : end.place + end.size]) for end in (head, tail))
            if digest_of(head_bytes, tail_bytes) != shard.digest:
                raise CorpusFileError(replaced(shard))


def identify(shards: Sequence[FileStamp], limits: Limits | None = None) -> list[RemoteFile]:
    """Return the remote file of each stamp. A stamp without a version means the present version.

    Raises:
      CorpusFileError: A file is missing or has another size. Only files without a version in their stamp are checked: for the
        others, no request is made.
    """
    without_version = [shard.path for shard in shards if shard.version is None]
    present = dict(zip(without_version, infos(without_version, limits), strict=True)) if without_version else {}
    identified = []
    for shard in shards:
        version = shard.version
        if version is None:
            _check_size(shard, present[shard.path])
            version = version_of(present[shard.path])
        fields = (shard.path, shard.size, shard.data_offset, shard.digest, version or "")
        # at least one of the fields changes when the file is replaced
        key = hashlib.blake2b("\0".join(map(str, fields)).encode(), digest_size=16).hexdigest()
        identified.append(RemoteFile(shard.path, shard.size, key, version))
    return identified


def _check_size(shard: FileStamp, info: Mapping[str, Any]) -> None:
    """Raise a CorpusFileError if the size in `info` differs from the stamp."""
    size = size_of(shard.path, info)
    if size != shard.size:
        raise CorpusFileError(size_change(shard, size)) from None
