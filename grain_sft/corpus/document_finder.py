"""DocumentFinder: the documents that a layout follows, found only where nothing remembers what they were found in."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from grain_sft.corpus import content
from grain_sft.corpus.document_keys import content_of_boundaries, content_of_tokens, hash_of_tokens, hashed_of
from grain_sft.corpus.documents import Documents, by_eos
from grain_sft.errors import CorpusFileError

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus


class DocumentFinder:
    """The documents that a layout follows, and the hash of what decides where they are.

    Args:
      corpus: whose documents.
      boundaries: "auto" (the corpus's own), or "eos": by its EOS tokens alone.
      bos_token_id: with it, an EOS ends a document only where it follows.
    """

    def __init__(self, corpus: Corpus, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self._corpus, self._bos = corpus, bos_token_id
        self._by_files = [shard.boundaries for shard in corpus.shards if shard.boundaries is not None]
        self._own = bos_token_id is None and (boundaries == "auto" or not self._by_files)
        if not self._own:
            self._by_files = []

    @functools.cached_property
    def content(self) -> str:
        """`Documents.content`; without looking for the documents where this machine remembers their files."""
        corpus = self._corpus
        if self._own and "documents" in vars(corpus):
            return corpus.documents.content
        if not self._by_files and corpus.eos_token_id is not None:
            hashes = content.recall(corpus.shards, of=hashed_of(corpus))
            return content_of_tokens(corpus, hashes, self._bos) if hashes is not None else self._found.content
        if self._by_files and len(self._by_files) == len(corpus.shards):
            hashes = content.recall(self._by_files)
            return content_of_boundaries(corpus, hashes) if hashes is not None else self._found.content
        return self._found.content  # or the error that says why there is none

    @functools.cached_property
    def tokens(self) -> str | None:
        """Hash of every token, where documents are found by EOS alone: `Documents.tokens` of the corpus's own."""
        corpus = self._corpus
        if self._by_files or any(shard.boundaries is not None for shard in corpus.shards):
            return None
        if "documents" in vars(corpus):
            return corpus.documents.tokens
        hashes = content.recall(corpus.shards, of=hashed_of(corpus))
        return self._found.tokens if hashes is None else hash_of_tokens(corpus, hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents.

        Raises:
          CorpusFileError: their files changed since `content` was asked for.
          CorpusError, CorpusFileError: as `find_documents`.
        """
        found = self._found
        if found.content != self.content:
            raise CorpusFileError(
                f"{self._corpus.shards[0].path}, or another file of its corpus, was written to while it was opened. Wait "
                "until the files are complete, then open the corpus again."
            )
        return found

    @functools.cached_property
    def _found(self) -> Documents:
        return self._corpus.documents if self._own else by_eos(self._corpus, self._bos)
