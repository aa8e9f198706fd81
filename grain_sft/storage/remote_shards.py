"""Tokens of shards in a bucket: the pieces of a whole batch in one round trip, whatever their number."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grain_sft.errors import CorpusFileError
from grain_sft.storage import activity, files, remote_files
from grain_sft.storage.file_stamp import DIGEST_BYTES, StoredFile, digest_of, replaced, size_change
from grain_sft.storage.remote_bodies import Range, version_of
from grain_sft.storage.remote_files import Limits
from grain_sft.storage.remote_options import RemoteOptions
from grain_sft.storage.shard_cache import CachedFile, ShardCache
from grain_sft.storage.shard_cache import Piece as CachePiece

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Piece = tuple[int, int, int, int]
"""Shard, first token, place of its first byte in the output, bytes."""


class RemoteShards:
    """The remote ones among `shards`. They take no file descriptor; each is checked once, when it is first read.

    Args:
      shards: the files, local ones too.
      itemsize: bytes of a value.
      options: how they are read; None: as the environment says.
    """

    def __init__(self, shards: Sequence[StoredFile], itemsize: int, options: RemoteOptions | None = None) -> None:
        self._shards = {number: shard for number, shard in enumerate(shards) if files.is_remote(shard.path)}
        self._itemsize = itemsize
        if not self._shards:
            return
        options = options or RemoteOptions.from_environment()
        self._limits = options.limits
        self._cache = None if options.cache is None else ShardCache(options.cache, options.limits)
        self._verified: set[int] = set()
        self._versions: dict[int, str | None] = {}  # of the shards that have been read
        self._files: dict[int, CachedFile] = {}

    def __len__(self) -> int:
        return len(self._shards)

    def gather(self, pieces: Sequence[Piece], out: memoryview) -> list[Piece]:
        """Fill `out` with the remote ones of `pieces`; returns the local ones.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        mine = [piece for piece in pieces if piece[0] in self._shards and piece[3]]
        new = sorted({piece[0] for piece in mine} - self._verified)
        if self._cache is None:
            self._read(mine, new, out)
        else:
            self._read_cached(self._cache, mine, new, out)
        local = [piece for piece in pieces if piece[0] not in self._shards]
        activity.count(remote_bytes=sum(piece[3] for piece in mine), local_bytes=sum(piece[3] for piece in local))
        return local

    def _offset(self, shard: int, start: int) -> int:
        return self._shards[shard].data_offset + start * self._itemsize

    def _read(self, pieces: Sequence[Piece], new: list[int], out: memoryview) -> None:
        shards = [self._shards[number] for number in new]
        versions = [file.version for file in identify(shards, self._limits)]
        verify(shards, versions, self._limits)
        self._versions |= dict(zip(new, versions, strict=True))
        self._verified |= set(new)
        ranges = []
        for shard, start, _, size in pieces:
            offset = self._offset(shard, start)
            ranges.append(Range(self._shards[shard].path, offset, offset + size, version=self._versions[shard]))
        bodies = remote_files.fetch_exactly(ranges, self._limits)
        for (_, _, place, size), body in zip(pieces, bodies, strict=True):
            out[place : place + size] = body

    def _read_cached(self, cache: ShardCache, pieces: Sequence[Piece], new: list[int], out: memoryview) -> None:
        for number, file in zip(new, identify([self._shards[number] for number in new], self._limits), strict=True):
            self._files[number] = file
        verify_cached([(self._files[number], self._shards[number]) for number in new], cache)
        self._verified |= set(new)
        cache.read(
            [
                CachePiece(self._files[shard], self._offset(shard, start), place, size)
                for shard, start, place, size in pieces
            ],
            out,
        )


def verify(shards: Sequence[StoredFile], versions: Sequence[str | None], limits: Limits) -> None:
    """Check that these versions of the files of `shards` have the size and the ends that were indexed.

    Raises:
      CorpusFileError: one has not, or can't be read.
    """
    ranges = []
    for shard, version in zip(shards, versions, strict=True):
        stop = min(shard.size, shard.data_offset + DIGEST_BYTES)
        ranges.append(Range(shard.path, shard.data_offset, stop, version=version))
    for shard, version in zip(shards, versions, strict=True):  # up to one byte more than there should be
        tail = max(shard.data_offset, shard.size - DIGEST_BYTES)
        ranges.append(Range(shard.path, tail, shard.size + 1, shard.size - tail, version))
    found = remote_files.fetch(ranges, limits)
    for shard, head, tail_found in zip(shards, found, found[len(shards) :], strict=False):
        ends = [end for end in (head, tail_found) if isinstance(end, bytes)]
        if len(ends) == 2 and digest_of(*ends) == shard.digest:
            continue
        (now,) = infos_of([shard], limits)
        if int(now["size"]) != shard.size:
            raise CorpusFileError(size_change(shard, int(now["size"])))
        if shard.version in (None, version_of(now)):
            both = [r._replace(stop=min(r.stop, shard.size), least=None) for r in ranges if r.path == shard.path]
            remote_files.fetch_exactly(both, limits)  # says what is wrong, if it is not the content
        raise CorpusFileError(replaced(shard))


def identify(shards: Sequence[StoredFile], limits: Limits) -> list[CachedFile]:
    """The versions of files that were indexed; where the index has none, those that are there now.

    Raises:
      CorpusFileError: one without a version is missing, unreadable, or of another size than was indexed.
    """
    unknown = [shard for shard in shards if shard.version is None]
    now = dict(zip((shard.path for shard in unknown), infos_of(unknown, limits), strict=True)) if unknown else {}
    identified = []
    for shard in shards:
        version = shard.version
        if version is None:
            info = now[shard.path]
            if int(info["size"]) != shard.size:
                raise CorpusFileError(size_change(shard, int(info["size"])))
            version = version_of(info)
        fields = (shard.path, shard.size, shard.data_offset, shard.digest, version or "")
        key = hashlib.blake2b("\0".join(map(str, fields)).encode(), digest_size=16).hexdigest()
        identified.append(CachedFile(shard.path, shard.size, key, version))
    return identified


def pinned(corpus: Corpus) -> Corpus:
    """`corpus` with the versions of its remote files as they are now, where it has none.

    Raises:
      CorpusFileError: one is missing, unreadable, or of another size than was indexed.
    """
    unknown = {file.path: file for file in corpus.files() if files.is_remote(file.path) and file.version is None}
    if not unknown:
        return corpus
    limits = Limits.from_environment() if corpus.remote is None else corpus.remote.limits
    found = {file.path: file.version for file in identify(list(unknown.values()), limits)}

    def pin(file: Any) -> Any:
        return file if file is None or file.path not in found else dataclasses.replace(file, version=found[file.path])

    shards = tuple(
        dataclasses.replace(pin(shard), loss=pin(shard.loss), boundaries=pin(shard.boundaries))
        for shard in corpus.shards
    )
    return dataclasses.replace(corpus, shards=shards, sources_file=pin(corpus.sources_file))


def verify_cached(found: Sequence[tuple[CachedFile, StoredFile]], cache: ShardCache) -> None:
    """Check the ends of files by way of the cache, so that no byte of them is fetched twice.

    Raises:
      CorpusFileError: other content than was indexed.
    """
    pieces, place = [], 0
    for file, shard in found:
        size = min(DIGEST_BYTES, shard.size - shard.data_offset)
        for offset in (shard.data_offset, shard.size - size):
            pieces.append(CachePiece(file, offset, place, size))
            place += size
    ends = memoryview(bytearray(place))
    cache.read(pieces, ends)
    for (_, shard), head, tail in zip(found, pieces[::2], pieces[1::2], strict=True):
        head_bytes, tail_bytes = (bytes(ends[end.place : end.place + end.size]) for end in (head, tail))
        if digest_of(head_bytes, tail_bytes) != shard.digest:
            raise CorpusFileError(replaced(shard))


def infos_of(shards: Sequence[StoredFile], limits: Limits) -> list[Mapping[str, Any]]:
    """What their file systems say of the files.

    Raises:
      CorpusFileError: missing or unreadable.
    """
    infos: list[Mapping[str, Any]] = []
    for shard, info in zip(shards, remote_files.infos([shard.path for shard in shards], limits), strict=True):
        with files.remote(shard.path):
            if isinstance(info, Exception):
                raise info
            infos.append(info)
    return infos
