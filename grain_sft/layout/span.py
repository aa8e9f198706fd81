"""What a layout says of a row."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import RowIndexError

FILL_ROW = -1
"""The row that is no row: only padding, no loss. Fills the last batch of an evaluation."""


class FillKey(int):
    """`FILL_ROW` as a record key. Grain wraps keys modulo the source's length; this one stays what it is."""

    def __mod__(self, other: int) -> int:
        return self


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one shard that a row holds. What follows in the same row of the same document is of the same
    segment: it goes on in the next shard.

    Attributes:
      shard: number of the shard in `corpus.shards`.
      start, stop: first token and the one after the last, counted from the shard's first token.
      document: number of the document in the corpus; None in a layout that does not follow documents.
    """

    shard: int
    start: int
    stop: int
    document: int | None


Range = tuple[int, int, int, int | None]
"""A span as a plain tuple: shard, start, stop, document."""


class Runs(NamedTuple):
    """One row as it is read: runs of tokens, each of which lies in a shard in one piece.

    Attributes:
      shards: of each run; None: all are of the first, and the only one.
      starts: the first token of each in its shard.
      stops: where each ends in the row.
      ends: where each segment ends in the row. One that goes on in the next shard is of several runs.
    """

    shards: list[int] | None
    starts: list[int]
    stops: list[int]
    ends: list[int]


class Pieces(NamedTuple):
    """The spans of many rows as columns, int64 [pieces]: what a reader copies where. Row after row, each from its first
    column on without gaps; what is left of a row is padding.

    `segment` and `position` are None in layouts whose rows are all one whole segment.
    """

    row: npt.NDArray[np.int64]  # position in the rows asked for
    column: npt.NDArray[np.int64]  # of the piece's first token in that row
    shard: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]
    segment: npt.NDArray[np.int64] | None = None  # number in its row, from 1
    position: npt.NDArray[np.int64] | None = None  # of the piece's first token in its segment

    def places(self, length: int) -> npt.NDArray[np.int64]:
        """Where each piece begins in the rows, `length` tokens each, one after the other."""
        return self.row * length + self.column


_INT64 = np.dtype(np.int64)


def checked_rows(
    indices: Sequence[int] | npt.NDArray[np.integer], layout: Layout
) -> tuple[npt.NDArray[np.int64], bool]:
    """Rows that a caller asks for: int64 [rows], and whether one of them is `FILL_ROW`.

    Raises:
      RowIndexError: one that is no integer, or no row of `layout`.
    """
    rows: Any
    if type(indices) is np.ndarray and indices.dtype is _INT64 and indices.ndim == 1:
        rows, listed = indices, indices.tolist()
        if listed and min(listed) >= 0 and max(listed) < len(layout):
            return rows, False
    else:
        try:
            listed = [operator.index(row) for row in indices]
        except TypeError as error:
            raise RowIndexError(f"rows {indices!r} of {layout!r}: expected integers, one after the other.") from error
        rows = None
    lowest, highest = (min(listed), max(listed)) if listed else (0, 0)
    if lowest < FILL_ROW or highest >= len(layout):
        wrong = lowest if lowest < FILL_ROW else highest
        raise RowIndexError(f"row {wrong} of {layout!r}: expected 0 to {len(layout) - 1}.")
    return np.array(listed, np.int64) if rows is None else rows, lowest == FILL_ROW


def checked_record(index: int, layout: Layout) -> int:
    """The one row that `source[index]` asks for: `FILL_ROW` only from a sampler, as FillKey.

    Raises:
      RowIndexError: it counts from the end.
    """
    if index == FILL_ROW and not isinstance(index, FillKey):
        raise RowIndexError(
            f"row {index} of {layout!r}: expected 0 to {len(layout) - 1}. Rows don't count from the end."
        )
    return index


def spans_of(layout: Layout, row: int) -> list[Span]:
    """What row `row` of `layout` holds.

    Raises:
      RowIndexError: no such row.
    """
    if not 0 <= row < len(layout):
        raise RowIndexError(f"row {row} of {layout!r}: expected 0 to {len(layout) - 1}.")
    return [Span(*each) for each in layout.ranges(int(row))]


class Layout(Protocol):
    """Which spans make row i, for every row of one sequence length; a pure function of corpus and options."""

    @property
    def corpus(self) -> Corpus:
        """What the rows are of."""
        ...

    @property
    def sequence_length(self) -> int:
        """Tokens of a row, padding included."""
        ...

    def __len__(self) -> int: ...

    @property
    def mean_segments(self) -> float:
        """Segments a row, on average."""
        ...

    def spans(self, row: int) -> list[Span]:
        """What row `row` holds, in the order in which it stands there."""
        ...

    def ranges(self, row: int) -> list[Range]:
        """The same, of a row in range."""
        ...

    def pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """The spans of all `rows` (int64 [rows], each in range)."""
        ...
