"""PaddedLayout: one document a row."""

from __future__ import annotations

import numpy as np

from grain_sft.arguments import as_integer, as_sequence_length
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.html import html_layout
from grain_sft.layout.row_pieces import Ints, ShardPlaces
from grain_sft.layout.span import Pieces, Range, Runs, Span, spans_of


class PaddedLayout:
    """One document a row, in order; the rest of the row is padding.

    Args:
      corpus: whose documents; see `Corpus.documents`.
      sequence_length: of a row.
      keep: "last" or "first" tokens of a document that is longer.
      min_tokens: shorter documents are left out.

    Attributes:
      dropped: documents that are left out.
      cut_tokens: tokens of longer documents that no row holds.
      highest_token: of the corpus, where that is known.

    Raises:
      LayoutError: arguments that don't fit, or no document is left.
      CorpusError, CorpusFileError: the documents can't be found.
    """

    def __init__(self, corpus: Corpus, sequence_length: int, *, keep: str = "last", min_tokens: int = 2) -> None:
        self.corpus = corpus
        self.sequence_length = as_sequence_length(sequence_length)
        if keep not in ("last", "first"):
            raise LayoutError(f"keep={keep!r}: expected 'last' or 'first'.")
        self.keep = keep
        self.min_tokens = as_integer("min_tokens", min_tokens, 1, LayoutError)
        start, length = corpus.documents
        self.highest_token = corpus.documents.highest_token
        self._document: Ints = np.flatnonzero(length >= self.min_tokens)
        if not len(self._document):
            raise LayoutError(
                f"no document of {len(length)} has {self.min_tokens} tokens or more. Give a smaller min_tokens."
            )
        whole = length[self._document]
        self._length = np.minimum(whole, self.sequence_length)
        self._start = start[self._document] + (whole - self._length if keep == "last" else 0)
        self._places = ShardPlaces(corpus)
        self.dropped = len(length) - len(whole)
        self.cut_tokens = int((whole - self._length).sum())

    def __len__(self) -> int:
        return len(self._document)

    @property
    def documents(self) -> Ints:
        """Number of the document in every row, int64 [rows]; ascending."""
        return self._document

    @property
    def mean_segments(self) -> float:
        """Segments a row: one."""
        return 1.0

    def spans(self, row: int) -> list[Span]:
        """What row `row` holds: its document, in two spans where it goes on in the next shard.

        Raises:
          RowIndexError: no such row.
        """
        return spans_of(self, row)

    def ranges(self, row: int) -> list[Range]:
        """The same, of a row in range."""
        columns = self._document, self._start, self._length
        return self._places.ranges(*([int(column[row])] for column in columns))

    def runs(self, row: int) -> Runs:
        """The same, as it is read."""
        return self._places.runs([self._start.item(row)], [self._length.item(row)])

    def pieces(self, rows: Ints) -> Pieces:
        """The documents of `rows` (int64 [rows])."""
        first = np.zeros(len(rows), np.int64)
        return self._places.pieces(np.arange(len(rows)), first, self._start[rows], self._length[rows], first + 1)

    def _repr_html_(self) -> str:
        return html_layout(self)

    def __repr__(self) -> str:
        return (
            f"PaddedLayout(sequence_length={self.sequence_length}, keep={self.keep!r}, min_tokens={self.min_tokens}, "
            f"rows={len(self)})"
        )
