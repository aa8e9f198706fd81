"""Pieces: columns that name the tokens of rows by shard, start and length."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import RowIndexError

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.layout.layout import Layout

Ints = npt.NDArray[np.int64]

FILL_ROW = -1
"""Row number of a row that holds only padding and takes no loss. Such rows fill the last batch of an evaluation."""

_INT64 = np.dtype(np.int64)


class FillKey(int):
    """`FILL_ROW` as a record key: Grain takes keys modulo the length of the source, and this one stays as it is."""

    def __mod__(self, other: int) -> int:
        return self


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one shard in one row. The next span of the same row and document continues its segment.

    Attributes:
      shard: Number of the shard in `corpus.shards`.
      start, stop: First token, and the one after the last, counted from the shard's first token.
      document: Number of the document in `layout.documents`; None in a layout that does not follow documents.
    """

    shard: int
    start: int
    stop: int
    document: int | None


class Pieces(NamedTuple):
    """Spans of many rows as columns, int64 [pieces], row after row. The pieces of a row fill it from column 0 without gaps;
    the rest of the row is padding.

    Attributes:
      row: Index into the given rows.
      column: Column of the piece's first token in its row.
      shard: Number of the shard in `corpus.shards`.
      start: First token of the piece, counted from the shard's first token.
      length: Tokens of the piece.
      segment: Number of the segment in its row, from 1; None where each row is one whole segment.
      position: Position of the piece's first token in its segment; None where each row is one whole segment.
      document: Number of the document in `layout.documents`, -1 for none; None in a layout that does not follow documents.
    """

    row: Int64[np.ndarray, " pieces"]
    column: Int64[np.ndarray, " pieces"]
    shard: Int64[np.ndarray, " pieces"]
    start: Int64[np.ndarray, " pieces"]
    length: Int64[np.ndarray, " pieces"]
    segment: Int64[np.ndarray, " pieces"] | None = None
    position: Int64[np.ndarray, " pieces"] | None = None
    document: Int64[np.ndarray, " pieces"] | None = None

    def offsets(self, length: int) -> Ints:
        """Return the offset of each piece in the flattened rows of `length` tokens each."""
        offsets: Ints = self.row * length + self.column
        return offsets

    @property
    def segment_columns(self) -> tuple[Ints, Ints]:
        """Columns `segment` and `position`, never None."""
        if self.segment is None or self.position is None:
            return np.ones(len(self.row), np.int64), self.column
        return self.segment, self.position


class ShardOffsets:
    """Offsets of the shards of a corpus in its tokens, counted through all shards."""

    def __init__(self, corpus: Corpus) -> None:
        borders: Ints = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards)], dtype=np.int64)
        self._begins, self._ends = borders[:-1], borders[1:]

    def pieces(self, row: Ints, column: Ints, start: Ints, length: Ints, segment: Ints, document: Ints) -> Pieces:
        """Return the pieces of segments, row after row; a segment that continues in the next shard is two. Arguments are int64
        [segments], as in `Pieces`; `start` is counted through the corpus.
        """
        position = np.zeros(len(start), np.int64)
        if len(self._ends) == 1:
            return Pieces(row, column, position, start, length, segment, position, document)
        shard, stop = self._ends.searchsorted(start, side="right"), start + length
        if not (stop > self._ends[shard]).any():
            return Pieces(row, column, shard, start - self._begins[shard], length, segment, position, document)
        # Rare: a shard ends in a segment.
        of, number = ragged(self._ends.searchsorted(stop - 1, side="right") - shard + 1)
        shard = shard[of] + number
        begin, end = np.maximum(start[of], self._begins[shard]), np.minimum(stop[of], self._ends[shard])
        of, shard, begin, end = (each[end > begin] for each in (of, shard, begin, end))  # without empty shards
        position = begin - start[of]
        columns = row[of], column[of] + position, shard, begin - self._begins[shard], end - begin
        return Pieces(*columns, segment[of], position, document[of])


def ragged(counts: Ints) -> tuple[Ints, Ints]:
    """Return the row of each item, and its number in the row, int64 [items] each; row i has `counts[i]` items."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def joined(part: Ints, columns_of: Callable[[int, Ints], Sequence[Ints]]) -> list[Ints]:
    """Return columns of rows of several parts, in the order of the rows. `part`, int64 [rows], is the part of each row;
    `columns_of` takes a part and the indices of its rows, int64 [n], and returns columns, the first with indices into
    these."""
    found = []
    for number in np.unique(part).tolist():
        here = np.flatnonzero(part == number)
        row, *columns = columns_of(number, here)
        found.append((here[row], *columns))
    whole = [np.concatenate(column) for column in zip(*found, strict=True)]
    order = np.argsort(whole[0], kind="stable")
    return [column[order] for column in whole]


def checked_rows(indices: Sequence[int] | npt.NDArray[np.integer], layout: Layout) -> tuple[Ints, bool]:
    """Return row numbers as int64 [rows], and whether one of them is `FILL_ROW`.

    Raises:
      RowIndexError: An index is not an integer, or not a row of `layout`.
    """
    try:
        of_int64 = type(indices) is np.ndarray and indices.dtype is _INT64 and indices.ndim == 1
        listed = indices.tolist() if of_int64 else [operator.index(row) for row in indices]  # type: ignore[union-attr]
    except TypeError as error:
        raise RowIndexError(f"rows {indices!r} of {layout!r}: expected integers, one after the other.") from error
    lowest, highest = (min(listed), max(listed)) if listed else (0, 0)
    if lowest < FILL_ROW or highest >= len(layout):
        wrong = lowest if lowest < FILL_ROW else highest
        raise RowIndexError(f"row {wrong} of {layout!r}: expected 0 to {len(layout) - 1}.")
    return indices if of_int64 else np.array(listed, np.int64), lowest == FILL_ROW  # type: ignore[return-value]


def checked_record(index: int, layout: Layout) -> int:
    """Return `index`, a row of `layout`; raise a `RowIndexError` if it is `FILL_ROW` and not a sampler's `FillKey`."""
    if index == FILL_ROW and not isinstance(index, FillKey):
        raise RowIndexError(
            f"row {index} of {layout!r}: expected 0 to {len(layout) - 1}. Rows don't count from the end."
        )
    return index
