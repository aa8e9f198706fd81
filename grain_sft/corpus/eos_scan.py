"""Scans of all tokens of a corpus: for EOS tokens, and for the hash of its bytes at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grain_sft.storage import ShardReader, hashing

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Ints = npt.NDArray[np.int64]

_SCAN_BYTES = hashing.BLOCK


def count_token(corpus: Corpus, token: int) -> int:
    """How often `token` occurs in the corpus."""
    return sum(int(np.count_nonzero(chunk == token)) for _, _, chunk in _chunks(corpus))


def scan(corpus: Corpus, bos_token_id: int | None) -> tuple[dict[str, Ints], list[str]]:
    """The arrays of `Documents`, and the hash of each shard's tokens."""
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    number, after, waiting, highest = -1, 0, False, 0
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, first, chunk in _chunks(corpus):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            found = np.flatnonzero(chunk == corpus.eos_token_id)
            if shard != number:
                number, after, waiting = shard, first, False
                last = first + corpus.shards[shard].num_tokens
            if bos_token_id is not None:
                inside = found[found < len(chunk) - 1]
                kept = inside[chunk[inside + 1] == bos_token_id]
                at_end = len(found) > len(inside)
                if waiting and chunk[0] == bos_token_id:  # the chunk before ended in an EOS
                    kept = np.append(np.int64(-1), kept)
                if at_end and first + len(chunk) == last:
                    kept = np.append(kept, found[-1])
                found, waiting = kept, at_end
            if len(found):
                found = found + (first + 1)
                starts.append(np.concatenate([[after], found[:-1]]))
                ends.append(found)
                after = int(found[-1])
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    start = np.concatenate(starts)
    highest = min(highest, np.iinfo(np.int64).max)
    arrays = {"start": start, "length": np.concatenate(ends) - start, "highest_token": np.array([highest], np.int64)}
    return arrays, hashes


def _chunks(corpus: Corpus) -> Iterator[tuple[int, int, npt.NDArray[np.unsignedinteger]]]:
    """(shard, first token counted through the corpus, tokens) of all tokens, each chunk in memory of its own."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    before = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            chunk: npt.NDArray[np.unsignedinteger] = np.empty(min(per_chunk, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [chunk.nbytes], memoryview(chunk.data).cast("B"))
            yield number, before + start, chunk
        before += shard.num_tokens
