"""Tokens of shards in a bucket: the pieces of a whole batch in one round trip, whatever their number."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from grain_sft import files
from grain_sft.corpus.stored import DIGEST_BYTES, StoredFile, digest_of, replaced, size_change
from grain_sft.errors import CorpusFileError

Piece = tuple[int, int, int, int]
"""Shard, first token, place of its first byte in the output, bytes."""


class RemoteShards:
    """The remote ones among `shards`. They take no file descriptor; each is checked once, when it is first read."""

    def __init__(self, shards: Sequence[StoredFile], itemsize: int) -> None:
        self._shards = {number: shard for number, shard in enumerate(shards) if files.is_remote(shard.path)}
        self._itemsize = itemsize
        self._verified: set[int] = set()

    def __len__(self) -> int:
        return len(self._shards)

    def gather(self, pieces: Sequence[Piece], out: memoryview) -> list[Piece]:
        """Fill `out` with the remote ones of `pieces`; returns the local ones.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        mine = [piece for piece in pieces if piece[0] in self._shards]
        new = {piece[0] for piece in mine} - self._verified
        _verify([self._shards[number] for number in sorted(new)])
        self._verified |= new
        ranges = []
        for number, start, _, size in mine:
            offset = self._shards[number].data_offset + start * self._itemsize
            ranges.append((self._shards[number].path, offset, offset + size))
        for (_, _, place, size), (path, offset, _), data in zip(mine, ranges, _read(ranges), strict=True):
            if isinstance(data, Exception) or len(data) != size:
                with files.remote(path) as client:
                    found = int(client.info(path)["size"])
                    if isinstance(data, Exception) and found >= offset + size:
                        raise data
                raise CorpusFileError(
                    f"{path}: asked for {size} bytes at byte {offset}, but the file has {found}: "
                    "it was cut short while in use."
                )
            out[place : place + size] = data
        return [piece for piece in pieces if piece[0] not in self._shards]


def _verify(shards: list[StoredFile]) -> None:
    """Check that the files of `shards` have the size and the ends that were indexed."""
    heads = [(shard.path, shard.data_offset, shard.data_offset + DIGEST_BYTES) for shard in shards]
    tails = [  # up to one byte more than there should be
        (shard.path, max(shard.data_offset, shard.size - DIGEST_BYTES), shard.size + 1) for shard in shards
    ]
    found = _read(heads + tails)
    for shard, head, tail in zip(shards, found, found[len(shards) :], strict=False):
        if (
            not isinstance(head, Exception)
            and not isinstance(tail, Exception)
            and digest_of(head, tail) == shard.digest
        ):
            continue
        with files.remote(shard.path) as client:
            size = int(client.info(shard.path)["size"])
            if size != shard.size:
                raise CorpusFileError(size_change(shard, size))
            for failed in (head, tail):
                if isinstance(failed, Exception):
                    raise failed
        raise CorpusFileError(replaced(shard))


def _read(ranges: list[tuple[str, int, int]]) -> list[bytes | Exception]:
    """The bytes of each (URL, start, stop), fewer where the file ends before, or what its client raised; all at once."""
    found: list[bytes | Exception] = []
    for _, group in itertools.groupby(ranges, key=lambda each: each[0].split("://", 1)[0]):
        paths, starts, stops = map(list, zip(*group, strict=True))
        with files.remote(paths[0]) as client:
            found += client.cat_ranges(paths, starts, stops, on_error="return")
    return found
