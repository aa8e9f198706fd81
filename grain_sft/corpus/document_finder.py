"""`DocumentFinder`: where the documents of a corpus begin and end."""

import functools

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.boundary_documents import boundary_files, read_documents_of_files
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.documents import Documents
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, artifact, hashing, in_threads
from grain_sft.types import Ints

_CACHED_FROM = 1 << 23  # bytes of tokens; fewer bytes are scanned in milliseconds
_CHUNK_BYTES = hashing.BLOCK  # a chunk is one block, because a file's hash is made from the hashes of its blocks


class DocumentFinder:
    """Finder of a corpus's documents, by its boundary files or its EOS tokens.

    Args:
      corpus: Corpus whose documents are found.
      boundaries: "eos" for EOS tokens, or "auto" for boundary files if the corpus has any, else EOS tokens.
      bos_token_id: BOS token. If it is given, boundary files are ignored, and an EOS ends a document only before this token or
        at the end of a shard.
    """

    def __init__(self, corpus: CorpusData, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self.corpus = corpus
        self._bos = bos_token_id
        self._by_files = corpus.has_boundary_files and boundaries == "auto" and bos_token_id is None
        self._pending: Documents | None = None  # documents that `_hash_and_find` found, until `documents` takes them

    @functools.cached_property
    def _hashes(self) -> list[str]:
        """Hash of each boundary file, or of each shard's tokens."""
        corpus = self.corpus
        if self._by_files:
            return content.hashes_of(boundary_files(corpus), self._hash_and_find)
        if corpus.eos_token_id is None:
            unused = "`boundaries` or `bos_token_id` leaves the boundary files unused"
            problem = unused if corpus.has_boundary_files else "no file states where documents end"
            raise CorpusError(f"{corpus.shards[0].path}: {problem}. Give eos_token_id.")
        return content.hashes_of(corpus.shards, self._hash_and_find, of=content.name_of_scan(corpus))

    def _hash_and_find(self) -> list[str]:
        """Compute `_hashes` and `_pending` in one pass over the files. Return `_hashes`."""
        self._pending, hashes = read_documents_of_files(self.corpus) if self._by_files else _scan(self.corpus, self._bos)
        return hashes

    @functools.cached_property
    def content(self) -> str:
        """Hash of the bytes that decide where documents begin and end, as `Documents.content`."""
        if self._by_files:
            return content.content_of_boundaries(self.corpus, self._hashes)
        return content.content_of_tokens(self.corpus, self._hashes, self._bos)

    @functools.cached_property
    def tokens_hash(self) -> str | None:
        """Hash of all tokens; None for a corpus with boundary files."""
        return None if self.corpus.has_boundary_files else content.hash_of_tokens(self.corpus, self._hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents. They are cached on disk if EOS tokens end them and the corpus has at least 8 MiB of tokens.

        Raises:
          CorpusFileError: A file is missing, is not the file that was indexed, or changed since `content` was computed.
          CorpusError: A boundary file is damaged or does not match the tokens, or EOS tokens are needed and the
            corpus has no `eos_token_id`.
        """
        key = self.content

        def take_pending() -> Documents:
            """Return the documents and clear `_pending`. Raise CorpusFileError unless their content hash is `key`."""
            if self._pending is None:
                self._hash_and_find()
            documents, self._pending = self._pending, None
            # If the hashes came from the cache, a file may have changed since.
            if documents is None or documents.content != key:
                path = self.corpus.shards[0].path
                raise CorpusFileError(f"{path} or a file of its corpus is being written to. Wait until it is complete.")
            return documents

        def make() -> dict[str, Ints]:
            documents = take_pending()
            highest = np.array([documents.highest_token])
            return {"start": documents.start, "length": documents.length, "highest_token": highest}

        if self._by_files or self.corpus.num_tokens * self.corpus.dtype.itemsize < _CACHED_FROM:
            return take_pending()
        arrays = artifact.load_or_make("documents", {"documents": 3, "content": key}, make)  # 3: version of the arrays
        # plain arrays, because indexing an `np.memmap` is slower
        start, length = arrays["start"].view(np.ndarray), arrays["length"].view(np.ndarray)
        return Documents(start, length, int(arrays["highest_token"][0]), key)


def _scan(corpus: CorpusData, bos_token_id: int | None) -> tuple[Documents, list[str]]:
    """Return the documents that EOS tokens end, and the hash of each shard's tokens."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, remote=corpus.remote)
    shard_starts = corpus.shard_borders[:-1]
    per_chunk = _CHUNK_BYTES // corpus.dtype.itemsize

    def scan_chunk(shard: int, start: int) -> tuple[Ints, int, bytes]:
        """Scan the chunk that begins at token `start` of a shard. Return three facts about it.

        The facts are: for each EOS that ends a document, the token offset after it in the joined shards; the highest token of
        the chunk; and the hash of the chunk.
        """
        tokens_left = corpus.shards[shard].num_tokens - start
        buffer = np.empty(min(per_chunk + 1, tokens_left), corpus.dtype)  # the chunk, and the token after it
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
    scanned = in_threads(lambda chunk: scan_chunk(*chunk), chunks)
    for (shard, _), (chunk_stops, chunk_highest, block_hash) in zip(chunks, scanned, strict=True):
        stops.append(chunk_stops)
        highest = max(highest, chunk_highest)
        block_hashes[shard].append(block_hash)
    stop = np.concatenate(stops)
    # A document begins at the end of its predecessor, or at the start of its shard.
    start = np.append(0, stop)[:-1]
    # For each shard, the first document that ends after the shard's start
    first_documents = np.searchsorted(stop, shard_starts, side="right")
    has_document = first_documents < len(stop)
    # If shard 3 has no EOS, shards 3 and 4 have the same first document. The last assignment, for shard 4, takes effect.
    start[first_documents[has_document]] = shard_starts[has_document]
    highest = min(highest, np.iinfo(np.int64).max)  # callers store int64, and a uint64 token may be larger
    hashes = list(map(hashing.joined, block_hashes))
    return Documents(start, stop - start, highest, content.content_of_tokens(corpus, hashes, bos_token_id)), hashes
