"""Scan of a corpus's tokens for the EOS that ends each document."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grain_sft.storage import ShardReader, hashing

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Ints = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.unsignedinteger]

_SCAN_BYTES = hashing.BLOCK


def scan(corpus: "Corpus", bos_token_id: int | None) -> tuple[Ints, Ints, int, list[str]]:
    """Return the first token and the length of each document, the highest token, and the hash of each shard's tokens.

    With `bos_token_id`, an EOS ends a document only if that token follows it, or if it is the last token of its shard.
    """
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    current, document_start, highest = -1, 0, 0
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, first, chunk, following in _chunks(corpus):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            is_end = chunk == corpus.eos_token_id
            if bos_token_id is not None:
                is_end[: len(following)] &= following == bos_token_id
            found = np.flatnonzero(is_end) + (first + 1)
            if shard != current:
                current, document_start = shard, first
            if len(found):
                starts.append(np.concatenate([[document_start], found[:-1]]))
                ends.append(found)
                document_start = int(found[-1])
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    start = np.concatenate(starts)
    return start, np.concatenate(ends) - start, min(highest, np.iinfo(np.int64).max), hashes


def _chunks(corpus: "Corpus") -> Iterator[tuple[int, int, Tokens, Tokens]]:
    """Yield (shard, token offset in the corpus, tokens, following tokens) of each chunk, in memory of its own.

    Item i of the following tokens follows token i of the chunk. Only a shard's last token has none.
    """
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    before = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            read: Tokens = np.empty(min(per_chunk + 1, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [read.nbytes], memoryview(read.data).cast("B"))
            yield number, before + start, read[:per_chunk], read[1:]
        before += shard.num_tokens
