"""Scan of all tokens of a corpus for EOS tokens, which end documents."""

import concurrent.futures

import numpy as np

from grain_sft.corpus.content import content_of_tokens
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.documents import Documents
from grain_sft.storage import ShardReader, hashing
from grain_sft.types import Ints

_CHUNK_BYTES = hashing.BLOCK


def scan(corpus: CorpusData, bos_token_id: int | None) -> tuple[Documents, list[str]]:
    """Return the documents that EOS tokens end, and the hash of each shard's tokens.

    With `bos_token_id`, an EOS ends a document only before this token or at the end of a shard.
    """
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, remote=corpus.remote)
    shard_starts = corpus.shard_borders[:-1]
    per_chunk = _CHUNK_BYTES // corpus.dtype.itemsize

    def scan_chunk(shard: int, start: int) -> tuple[Ints, int, bytes]:
        """Return where documents end in the chunk at token `start` of a shard, the chunk's highest token, and its hash."""
        tokens_left = corpus.shards[shard].num_tokens - start
        buffer = np.empty(min(per_chunk + 1, tokens_left), corpus.dtype)
        reader.gather([shard], [start], [0], [buffer.nbytes], buffer.data.cast("B"))
        chunk, next_tokens = buffer[:per_chunk], buffer[1:]  # the last token of a shard has no next token
        ends_document = chunk == corpus.eos_token_id
        if bos_token_id is not None:
            ends_document[: len(next_tokens)] &= next_tokens == bos_token_id
        stops = np.flatnonzero(ends_document) + (shard_starts[shard] + start + 1)
        return stops, int(chunk.max()), hashing.of_block(chunk.data)

    chunks = [(i, start) for i, shard in enumerate(corpus.shards) for start in range(0, shard.num_tokens, per_chunk)]
    stops, highest = [np.empty(0, np.int64)], 0
    block_hashes: list[list[bytes]] = [[] for _ in corpus.shards]
    with concurrent.futures.ThreadPoolExecutor(hashing.THREADS) as pool:
        scanned = pool.map(lambda chunk: scan_chunk(*chunk), chunks)
        for (shard, _), (chunk_stops, chunk_highest, block_hash) in zip(chunks, scanned, strict=True):
            stops.append(chunk_stops)
            highest = max(highest, chunk_highest)
            block_hashes[shard].append(block_hash)
    stop = np.concatenate(stops)
    # A document begins at the end of its predecessor, or at the start of its shard. If shard 3 has no EOS, `first_documents`
    # has the same document for shards 3 and 4. Numpy assigns both starts in order, and the second one stays: the document
    # begins at the start of shard 4.
    start = np.append(0, stop)[:-1]
    first_documents = np.searchsorted(stop, shard_starts, side="right")
    has_document = first_documents < len(stop)
    start[first_documents[has_document]] = shard_starts[has_document]
    highest = min(highest, np.iinfo(np.int64).max)  # callers store int64, and a uint64 token may be larger
    hashes = list(map(hashing.joined, block_hashes))
    return Documents(start, stop - start, highest, content_of_tokens(corpus, hashes, bos_token_id)), hashes
