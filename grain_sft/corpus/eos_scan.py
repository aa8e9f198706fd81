"""Scan of a corpus's tokens for the EOS that ends each document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grain_sft.storage import ShardReader, hashing

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger]

ARRAYS = ("start", "length", "highest_token")
"""Names of the arrays that `scan` returns, int64; `highest_token` has one item."""

_SCAN_BYTES = hashing.BLOCK


def scan(corpus: Corpus, bos_token_id: int | None) -> tuple[dict[str, Ints], list[str]]:
    """Return the arrays of `Documents` by name, and the hash of each shard's tokens.

    With `bos_token_id`, an EOS ends a document only if that token follows it, or if it is the last token of its shard.
    """
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    current, document_start, highest = -1, 0, 0
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, first, chunk, following in _chunks(corpus, ahead=0 if bos_token_id is None else 1):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            found = np.flatnonzero(chunk == corpus.eos_token_id)
            if bos_token_id is not None:
                at_end = found == len(following)  # the last token of its shard
                found = found[at_end | (following[found - at_end] == bos_token_id)] if len(following) else found
            if shard != current:
                current, document_start = shard, first
            if len(found):
                found = found + (first + 1)
                starts.append(np.concatenate([[document_start], found[:-1]]))
                ends.append(found)
                document_start = int(found[-1])
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    start = np.concatenate(starts)
    values = start, np.concatenate(ends) - start, np.array([min(highest, np.iinfo(np.int64).max)], np.int64)
    return dict(zip(ARRAYS, values, strict=True)), hashes


def _chunks(corpus: Corpus, ahead: int) -> Iterator[tuple[int, int, Tokens, Tokens]]:
    """Yield (shard, token offset in the corpus, tokens, following tokens) of each chunk, in memory of its own.

    Item i of the following tokens follows token i of the chunk. With `ahead=1`, only a shard's last token has none.
    """
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    before = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            read: Tokens = np.empty(min(per_chunk + ahead, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [read.nbytes], memoryview(read.data).cast("B"))
            yield number, before + start, read[:per_chunk], read[1:]
        before += shard.num_tokens
