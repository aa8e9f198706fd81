"""ColumnsLayout: some columns of the rows of another layout."""

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import Pieces
from grain_sft.types import Ints

# Attributes with the same values as in the layout of whole rows.
_SAME_TRAITS = ("corpus", "of_pairs", "takes_weights", "highest_token", "follows_documents", "finder", "one_segment")


class ColumnsLayout(Layout):
    """Columns [start, stop) of the rows of a layout, under the same row numbers.

    Segments keep the numbers and positions that they have in the whole row. If column 500 begins segment 2, column 512 is
    position 12 of segment 2. A row that has only padding in these columns has no pieces.

    With context parallelism, several hosts share a row. Each of them reads only its columns through this layout.

    Args:
      layout: Layout of whole rows.
      start, stop: First column, and the column after the last.

    Raises:
      LayoutError: The rows lack these columns, have several lengths, or belong to a mixture.
    """

    kind = "columns"
    _layout: Layout

    def __init__(self, layout: Layout, start: int, stop: int) -> None:
        length = layout.sequence_length
        start, stop = as_integer("start", start, 0, LayoutError), as_integer("stop", stop, 0, LayoutError)
        if not start < stop <= length:
            raise LayoutError(f"columns {start} to {stop}: expected 0 <= start < stop <= {length} (length of a row).")
        if len(layout.parts) > 1:
            raise LayoutError("columns of a mixture: take the columns of each source with MixtureSource.columns.")
        if isinstance(layout, ColumnsLayout):  # columns of columns: count them from column 0 of the whole rows
            layout, start, stop = layout._layout, layout.first_column + start, layout.first_column + stop
        if layout.row_lengths:
            raise LayoutError(f"columns of {layout!r}: expected rows of one length. Read whole rows, and cut them.")
        self._layout, self._stop = layout, stop
        self.sequence_length, self.first_column = stop - start, start
        for name in _SAME_TRAITS:
            setattr(self, name, getattr(layout, name))

    def __len__(self) -> int:
        return len(self._layout)

    def pieces(self, rows: Ints) -> Pieces:
        """Return the pieces of whole rows, cut to these columns. Column 0 is the first of these columns."""
        whole = self._layout.pieces(rows)
        begin = np.maximum(whole.column, self.first_column)
        # a piece outside these columns gets length 0 or less
        length = np.minimum(whole.column + whole.length, self._stop) - begin
        skipped = begin - whole.column
        cut = whole._replace(column=begin - self.first_column, start=whole.start + skipped, length=length)
        if whole.position is not None:
            cut = cut._replace(position=whole.position + skipped)
        kept = np.flatnonzero(length > 0)
        return Pieces(*[None if values is None else values[kept] for values in cut])  # type: ignore[arg-type]

    @property
    def mean_segments(self) -> float:
        """Estimated mean number of segments in a row. The estimate assumes that segments end equally often in all columns."""
        return 1 + (self._layout.mean_segments - 1) * self.sequence_length / self._layout.sequence_length

    def rows_of_documents(self, documents: Ints) -> Ints:
        """Return the whole rows that have a token of `documents`, even if these columns have none."""
        return self._layout.rows_of_documents(documents)

    def __repr__(self) -> str:
        return f"ColumnsLayout({self._layout!r}, start={self.first_column}, stop={self._stop})"
