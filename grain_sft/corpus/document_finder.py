"""DocumentFinder: where the documents of a corpus begin and end, by its boundary files or its EOS tokens."""

import functools

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.boundary_documents import boundary_files, read_documents_of_files
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.documents import Documents
from grain_sft.corpus.eos_scan import scan
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import artifact
from grain_sft.types import Ints

_CACHED_FROM = 1 << 23  # bytes of tokens; in fewer, documents are found in milliseconds, so they are not cached


class DocumentFinder:
    """Finder of a corpus's documents, by its boundary files or its EOS tokens.

    If the hashes of the files are not cached, one pass over the files computes the hashes and finds the documents.

    Args:
      corpus: Corpus whose documents are found.
      boundaries: What ends a document. "auto" means the boundary files of the corpus if it has any, else its EOS tokens. "eos"
        means its EOS tokens.
      bos_token_id: BOS token. If it is given, an EOS ends a document only before this token or at the end of a shard, and
        `boundaries` counts as "eos".
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
            raise CorpusError(f"{corpus.shards[0].path}: no file states where documents end. Give eos_token_id.")
        return content.hashes_of(corpus.shards, self._hash_and_find, of=content.name_of_scan(corpus))

    def _hash_and_find(self) -> list[str]:
        """Read the boundary files or all tokens, set `_pending`, and return `_hashes`."""
        self._pending, hashes = read_documents_of_files(self.corpus) if self._by_files else scan(self.corpus, self._bos)
        return hashes

    @functools.cached_property
    def content(self) -> str:
        """Hash of the bytes that decide where documents begin and end, as `Documents.content`."""
        if self._by_files:
            return content.content_of_boundaries(self.corpus, self._hashes)
        return content.content_of_tokens(self.corpus, self._hashes, self._bos)

    @functools.cached_property
    def tokens(self) -> str | None:
        """Hash of all tokens; None for a corpus with boundary files."""
        return None if self.corpus.has_boundary_files else content.hash_of_tokens(self.corpus, self._hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents. They are cached on disk if EOS tokens end them and the corpus has at least 8 MiB of tokens.

        Raises:
          CorpusFileError: A file is missing, is not the file that was indexed, or changed since `content` was computed.
          CorpusError: A boundary file is damaged or does not match the tokens, or the corpus has neither boundary files nor
            `eos_token_id`.
        """
        key = self.content

        def take_pending() -> Documents:
            if self._pending is None:
                self._hash_and_find()
            documents, self._pending = self._pending, None
            # If the hashes were cached, a file may have changed since then: then `content` and the documents do not agree.
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
        arrays = artifact.load_or_make("documents", {"documents": 3, "content": key}, make)
        start, length = arrays["start"].view(np.ndarray), arrays["length"].view(np.ndarray)
        return Documents(start, length, int(arrays["highest_token"][0]), key)
