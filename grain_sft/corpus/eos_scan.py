"""Scan of all tokens of a corpus for EOS tokens. Each ends a document."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.data import CorpusData
from grain_sft.storage import ShardReader, hashing
from grain_sft.types import Ints

Tokens = npt.NDArray[np.unsignedinteger]

_CHUNK_BYTES = hashing.BLOCK


def scan(corpus: CorpusData, bos_token_id: int | None) -> tuple[Ints, Ints, int, list[str]]:
    """Return the token offset and the length of each document, the highest token, and the hash of each shard's tokens.

    Token offsets and lengths are int64 [documents]; offsets count through all shards. With `bos_token_id`, an EOS ends a
    document only if that token follows it, or if it is the last token of its shard.
    """
    highest = 0
    stops = [np.empty(0, np.int64)]
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, chunk_start, chunk, next_tokens in _chunks(corpus):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            ends_document = chunk == corpus.eos_token_id
            if bos_token_id is not None:
                ends_document[: len(next_tokens)] &= next_tokens == bos_token_id
            stops.append(np.flatnonzero(ends_document) + (chunk_start + 1))
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    stop = np.concatenate(stops)
    # A document begins at the end of its predecessor, or at the start of its shard. If shard 3 has no EOS, `first_documents`
    # has the same document for shards 3 and 4. Numpy assigns in order, so the document begins at the start of shard 4.
    start = np.append(0, stop)[:-1]
    shard_starts = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards[:-1])])
    first_documents = np.searchsorted(stop, shard_starts, side="right")
    has_document = first_documents < len(stop)
    start[first_documents[has_document]] = shard_starts[has_document]
    highest = min(highest, np.iinfo(np.int64).max)  # callers store int64, and a uint64 token may be larger
    return start, stop - start, highest, hashes


def _chunks(corpus: CorpusData) -> Iterator[tuple[int, int, Tokens, Tokens]]:
    """Yield (shard, token offset in the corpus, tokens, next tokens) of each chunk of each shard, in new arrays.

    `next tokens[i]` follows `tokens[i]`. The last token of a shard has no next token, so the last array is one shorter.
    """
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _CHUNK_BYTES // corpus.dtype.itemsize
    shard_start = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            buffer: Tokens = np.empty(min(per_chunk + 1, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [buffer.nbytes], memoryview(buffer.data).cast("B"))
            yield number, shard_start + start, buffer[:per_chunk], buffer[1:]
        shard_start += shard.num_tokens
