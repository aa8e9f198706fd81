"""`Corpus`, which reads tokens, documents and loss masks from a list of token files."""

from __future__ import annotations

import dataclasses
import functools
import operator
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.arguments import check_choice
from grain_sft.corpus import index_writer
from grain_sft.corpus.boundary_documents import read_unjoined_documents
from grain_sft.corpus.content import content_of_corpus
from grain_sft.corpus.data import CorpusData
from grain_sft.corpus.document_finder import DocumentFinder
from grain_sft.corpus.documents import Document, Documents, read_sources
from grain_sft.corpus.loss import LossReader
from grain_sft.corpus.shard import as_token_id, check_signed
from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.storage import ShardReader, files
from grain_sft.types import Array, Ints

if TYPE_CHECKING:
    from jaxtyping import Shaped, UInt

_BLOCK_TOKENS = 1 << 20  # tokens that `iter_documents` reads at once


class Corpus(CorpusData):
    """Token files of one dtype, in order, with sidecar files that state which tokens take loss and where documents end.

    `grain_sft.open_corpus` makes a corpus. The corpus opens its files on first use, and its pickle holds no open file. Its
    attributes are those of `CorpusData`.
    """

    def _repr_html_(self) -> str:
        loss = {shard.loss.kind for shard in self.shards if shard.loss is not None}
        facts = {
            "tokens": self.num_tokens,
            "dtype": self.dtype.name,
            "shards": len(self.shards),
            "first shard": self.shards[0].path if self.shards else None,
            "documents": vars(self).get("num_documents"),  # only if cached: counting may read all tokens
            "loss": " and ".join(sorted(loss)) or "on all tokens",
            "EOS id": self.eos_token_id,
            "padding id": self.padding_token_id,
            "tokenizer": self.tokenizer,
        }
        return html_facts(type(self).__name__, facts)

    @functools.cached_property
    def num_documents(self) -> int | None:
        """Number of `documents`; None if the corpus has neither boundary files nor an EOS id."""
        return len(self.documents) if self.has_boundary_files or self.eos_token_id is not None else None

    @functools.cached_property
    def documents(self) -> Documents:
        """Start and length of each document, in order. The first access reads the boundary files, or else all tokens.

        Without boundary files, each EOS ends a document, and tokens after a shard's last EOS are in no document.

        Raises:
          CorpusFileError: A file is missing or is not the one that was indexed.
          CorpusError: A boundary file is damaged, or the corpus has neither boundary files nor `eos_token_id`.
        """
        return self._finder.documents

    @functools.cached_property
    def sequences(self) -> Documents:
        """Start and length of each sequence, in order. Errors are those of `documents`.

        Documents of Megatron's files are groups of sequences. In any other corpus, each document is one sequence.
        """
        if any(shard.boundaries is not None and shard.boundaries.groups_sequences for shard in self.shards):
            return read_unjoined_documents(self, by_sequence=True)
        return self.documents

    @functools.cached_property
    def _finder(self) -> DocumentFinder:
        return DocumentFinder(self)

    def find_documents(self, boundaries: str = "auto", bos_token_id: int | None = None) -> DocumentFinder:
        """Return a `DocumentFinder` with these arguments. Raise a CorpusError for arguments that it does not accept."""
        check_choice("boundaries", boundaries, ("auto", "eos"), CorpusError)
        as_token_id("bos_token_id", bos_token_id, self.dtype, self.signed)
        finds_same_documents = bos_token_id is None and (boundaries == "auto" or not self.has_boundary_files)
        return self._finder if finds_same_documents else DocumentFinder(self, boundaries, bos_token_id)

    @functools.cached_property
    def sources(self) -> Ints | None:
        """Input that each document was made from, int64 [documents, 2]; None without `sources_file`.

        Column 0 is an index into `source_names`. Column 1 is the line or row of that input, counted from 1.

        Raises:
          CorpusFileError: `sources_file` is missing.
          CorpusError: `sources_file` does not have one entry for each document.
        """
        return None if self.sources_file is None else read_sources(self.sources_file, len(self.documents))

    @functools.cached_property
    def _readers(self) -> tuple[ShardReader, LossReader | None]:
        """Readers of tokens and of loss, which several threads may use at once."""
        tokens = ShardReader(self.shards, self.dtype.itemsize, remote=self.remote)
        loss = LossReader(self.loss_files, remote=self.remote) if self.has_loss else None
        return tokens, loss

    def read(self, start: int, stop: int) -> tuple[UInt[np.ndarray, " tokens"], Shaped[np.ndarray, " tokens"] | None]:
        """Return the tokens with the offsets [start, stop) in the joined shards, and their loss.

        Returns:
          Two arrays [stop - start]: the tokens, of the corpus's dtype, and their loss. The loss is float32 if the corpus has
          weights, else bool. Without loss files, the loss is None, and every token takes loss.

        Raises:
          RowIndexError: The range is not within [0, num_tokens].
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
          CorpusError: A token or a weight is negative, or a weight is not finite.
        """
        start, stop = operator.index(start), operator.index(stop)
        if not 0 <= start <= stop <= self.num_tokens:
            raise RowIndexError(f"tokens {start} to {stop}: expected a range within 0 to {self.num_tokens}.")
        borders, (token_reader, loss_reader) = self.shard_borders, self._readers
        # Arrays [pieces]. A piece is the tokens of the range in one shard.
        shard = np.flatnonzero((borders[1:] > start) & (borders[:-1] < stop))
        piece_start = np.maximum(borders[shard], start)
        length = np.minimum(borders[shard + 1], stop) - piece_start
        start_in_shard = piece_start - borders[shard]
        start_in_result = piece_start - start
        tokens: Array = np.empty(stop - start, self.dtype)
        width = tokens.itemsize
        token_reader.gather(shard, start_in_shard, start_in_result * width, length * width, tokens.data.cast("B"))
        if self.signed:
            check_signed(tokens, self.shards, self.dtype, lambda: (shard, start_in_shard, start_in_result))
        if loss_reader is None:
            return tokens, None
        return tokens, loss_reader.gather(shard, start_in_shard, start_in_result, length, len(tokens))

    def document(self, number: int) -> Document:
        """Return document `number`, counted from 0. Errors are those of `documents` and `read`."""
        number = operator.index(number)
        if not 0 <= number < len(self.documents):
            raise RowIndexError(f"document {number} of {self!r}: expected 0 to {len(self.documents) - 1}.")
        return next(self._read_documents(number, number + 1))

    def iter_documents(self) -> Iterator[Document]:
        """Yield every document in order, as views of larger arrays. Errors are those of `documents` and `read`."""
        start, length = self.documents
        stop = start + length
        # Some formats list documents in any order. The documents [0, 9), [9, 12), [3, 5) are two runs, since the third begins
        # before the end of the second. A read stays within a run.
        run_ends = np.append(np.flatnonzero(start[1:] < stop[:-1]) + 1, len(start))
        first = 0
        while first < len(start):
            run_end = int(run_ends[np.searchsorted(run_ends, first, side="right")])
            num_fitting = int(np.searchsorted(stop[first:run_end], start[first] + _BLOCK_TOKENS, side="right"))
            end = first + max(1, num_fitting)  # a document may be longer than `_BLOCK_TOKENS`
            yield from self._read_documents(first, end)
            first = end

    def _read_documents(self, first: int, end: int) -> Iterator[Document]:
        """Yield documents `first` to `end - 1` after one read. Each must begin at or after its predecessor's end."""
        starts, lengths = (column[first:end] for column in self.documents)
        block_start = int(starts[0])
        tokens, loss = self.read(block_start, int(starts[-1] + lengths[-1]))
        if tokens.dtype.itemsize > 4 and (highest := int(tokens.max(initial=0))) > np.iinfo(np.uint32).max:
            problem = f"token id {highest}: no vocabulary has it. The corpus was opened with the wrong dtype"
            raise CorpusError(f"{problem}. Open it with the dtype that its files have.")
        tokens = tokens.astype(np.uint32, copy=False)
        if loss is None:
            loss = np.ones(len(tokens), np.bool_)
        sources = [None] * (end - first) if self.sources is None else map(tuple, self.sources[first:end].tolist())
        for begin, length, source in zip((starts - block_start).tolist(), lengths.tolist(), sources, strict=True):
            yield Document(tokens[begin : begin + length], loss[begin : begin + length], source)

    def content_hash(self) -> str:
        """Return a hash of all token, loss and boundary files, the dtype and the EOS id, such as "content-sha256:3f9a…".

        Files whose hashes are not cached are read, at about 1 GB/s per core. A missing or unreadable file raises a
        CorpusFileError.
        """
        return content_of_corpus(self)

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        format: str = "grain_sft",
        sequence_length: int | None = None,
        tokenizer: str | None = None,
    ) -> None:
        """Write an index that `open_corpus` opens without scanning the files again.

        Args:
          path: Path of the JSON file, written atomically.
          format: "grain_sft", or "maxtext" for an index that MaxText's `olmo_grain` reads. In a "grain_sft" index, files in the
            folder of `path` or below are listed by relative paths, so that the folder can be moved.
          sequence_length: Number of tokens in a row, for a "maxtext" index only.
          tokenizer: Name of the tokenizer, for a "maxtext" index only. None means the tokenizer of the corpus.

        Raises:
          StorageError: `path` can't be written, or is a file of the corpus.
          CorpusError: The format is unknown, can't express this corpus, or is "maxtext" and `sequence_length` is None.
        """
        index_writer.save(self, files.normalize(path), format, sequence_length, tokenizer)

    def __getstate__(self) -> dict[str, Any]:
        # without cached properties, which may be large or hold open files
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def __repr__(self) -> str:
        sizes = f"shards={len(self.shards)}, num_tokens={self.num_tokens}, dtype={self.dtype.name}"
        return f"Corpus({sizes}, eos_token_id={self.eos_token_id}, ends_fingerprint={self.ends_fingerprint!r})"
