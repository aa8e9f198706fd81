"""MaterializedLayout: rows that were written out, as they stand on disk."""

from __future__ import annotations

import numpy as np

from grain_sft.arguments import as_sequence_length
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.html import html_layout
from grain_sft.layout.row_pieces import Ints, ShardPlaces
from grain_sft.layout.span import Pieces, Range, Span, spans_of


class MaterializedLayout:
    """The rows of a corpus that `grain-sft pack --materialize` wrote, in the order of the packing.

    Advantages: the fastest to read; no plan, and no documents to be found, when a run starts. Disadvantages: the rows take
    their space on disk (tokens, and as a rule 4 bytes more each), and other lengths or algorithms are other rows.

    Args:
      corpus: of the format rows.
      sequence_length: what it is expected to be; None: whatever it is.

    Raises:
      LayoutError: a corpus without rows, or rows of another length.
    """

    def __init__(self, corpus: Corpus, sequence_length: int | None = None) -> None:
        if corpus.rows is None:
            raise LayoutError(
                "a corpus without rows: write them with `grain-sft pack --materialize` and open what that wrote, or take "
                "PackedLayout."
            )
        self.corpus = corpus
        self.sequence_length = corpus.rows.sequence_length
        if sequence_length is not None and (as_sequence_length(sequence_length) != self.sequence_length):
            raise LayoutError(f"sequence_length={sequence_length}: the rows were written with {self.sequence_length}.")
        self._count = corpus.num_tokens // self.sequence_length
        self._places = ShardPlaces(corpus)

    def __len__(self) -> int:
        return self._count

    @property
    def mean_segments(self) -> float:
        """Segments a row, on average."""
        return len(self.corpus.documents.start) / len(self)

    def spans(self, row: int) -> list[Span]:
        """What row `row` holds; documents are the segments of all rows, numbered one after the other.

        Raises:
          RowIndexError: no such row.
        """
        return spans_of(self, row)

    def ranges(self, row: int) -> list[Range]:
        """The same, of a row in range."""
        starts, lengths = self.corpus.documents
        segments = slice(*starts.searchsorted((row * self.sequence_length, (row + 1) * self.sequence_length)).tolist())
        numbers = range(segments.start, segments.stop)
        return self._places.ranges(numbers, starts[segments].tolist(), lengths[segments].tolist())

    def pieces(self, rows: Ints) -> Pieces:
        """The segments of `rows` (int64 [rows]). Reads where all documents begin, the first time."""
        starts, lengths = self.corpus.documents
        begins = starts.searchsorted(rows * self.sequence_length)
        counts = starts.searchsorted((rows + 1) * self.sequence_length) - begins
        row = np.arange(len(rows)).repeat(counts)
        within = np.arange(len(row)) - (counts.cumsum() - counts)[row]
        start = starts[begins[row] + within]
        column = start - rows[row] * self.sequence_length
        return self._places.pieces(row, column, start, lengths[begins[row] + within], within + 1)

    def _repr_html_(self) -> str:
        return html_layout(self)

    def __repr__(self) -> str:
        return f"MaterializedLayout(sequence_length={self.sequence_length}, rows={len(self)})"
