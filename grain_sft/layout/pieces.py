"""Pieces: columns that name the tokens of rows by shard, start and length."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError, RowIndexError
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.layout.layout import Layout


LeftOut = tuple[str, int | None, int | None]
"""What no row holds, in words; how many documents; how many tokens. A number that is not counted is None."""

FILL_ROW = -1
"""Row number of a row that holds only padding and takes no loss. Such rows fill the last batch of an evaluation."""

_INT64 = np.dtype(np.int64)


class FillKey(int):
    """`FILL_ROW` as a record key. Grain reads record `key % num_rows`, which would make -1 the last row; here `%` keeps -1."""

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
    """Spans of many rows as columns, int64 [pieces], row after row. Pieces fill a row from column 0 without gaps; the
    rest of the row is padding.

    Attributes:
      row: Index into the rows that were asked for.
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

    @classmethod
    def checked(cls, columns: Any, layout: Layout, rows: Ints) -> Pieces:
        """Return `columns`, which a layout returned as the pieces of `rows`, as int64.

        Raises:
          LayoutError: A reader could not fill the rows from them.
        """
        try:
            pieces = cls._make(
                None if column is None else np.asarray(column).astype("i8", casting="safe") for column in columns
            )
            faults = pieces._faults(layout, rows)
        except (TypeError, ValueError, IndexError) as error:
            raise LayoutError(f"{layout.kind}.pieces: {error}. Expected int64 columns of one length.") from error
        for fault, wrong in faults.items():
            if wrong.any():
                at = int(wrong.argmax())
                row, column, shard, start, length = (int(each[at]) for each in pieces[:5])
                number = f"row {rows[row]}" if 0 <= row < len(rows) else f"index {row} of {len(rows)} rows"
                piece = f"a piece of {length} tokens at column {column}, from token {start} of shard {shard} on"
                raise LayoutError(f"{layout.kind}.pieces: {number}: {piece}, {fault}. Fix the layout.")
        if pieces.segment is None and pieces.length.sum() != len(rows) * layout.width(rows):
            raise LayoutError(f"{layout.kind}.pieces: rows with padding need the columns `segment` and `position`.")
        if pieces.document is None and layout.follows_documents:
            raise LayoutError(f"{layout.kind}.pieces: `follows_documents` is set, but `document` is missing.")
        return pieces

    def _faults(self, layout: Layout, rows: Ints) -> dict[str, npt.NDArray[np.bool_]]:
        """Return for each fault a mask of the pieces that have it."""
        row, column, shard, start, length, *_ = self
        segment, position = self.segment_columns
        document = np.full(len(row), -1) if self.document is None else self.document
        stop = column + length
        is_first = np.diff(row, prepend=-1) != 0  # in its row
        stop_before, segment_before = (np.where(is_first, 0, np.roll(each, 1)) for each in (stop, segment))
        num_tokens = np.array([each.num_tokens for each in layout.corpus.shards])
        in_shards = (shard >= 0) & (shard < len(num_tokens))
        in_file = in_shards & (start >= 0) & (start + length <= num_tokens[np.where(in_shards, shard, 0)])
        return {
            "is of another row, or out of order": (row < 0) | (row >= len(rows)) | (np.diff(row, prepend=0) < 0),
            "has no tokens": length < 1,
            "is not in the file": ~in_file,
            "does not begin where the piece before it ends": column != stop_before,
            f"ends after the row of {layout.sequence_length}": stop > layout.sequence_length,
            "skips a segment": (segment < np.maximum(1, segment_before)) | (segment > segment_before + 1),
            "has a negative position": position < 0,
            "names a document, but `follows_documents` is not set": (document >= 0) & (not layout.follows_documents),
        }

    def offsets(self, length: int) -> Ints:
        """Return the token offset of each piece in the flattened rows of `length` tokens each."""
        offsets: Ints = self.row * length + self.column
        return offsets

    @property
    def segment_columns(self) -> tuple[Ints, Ints]:
        """Columns `segment` and `position`, never None."""
        if self.segment is None or self.position is None:
            return np.ones(len(self.row), np.int64), self.column
        return self.segment, self.position

    @property
    def segment_begins(self) -> Ints:
        """Index of the first piece of each segment of each row, int64 [segments]."""
        segment = self.segment_columns[0]
        begins = (self.row[1:] != self.row[:-1]) | (segment[1:] != segment[:-1])
        return np.flatnonzero(np.append(True, begins)[: len(self.row)])


class ShardOffsets:
    """First and last tokens of the shards of a corpus, which turn tokens of the corpus into tokens of a shard."""

    def __init__(self, corpus: Corpus) -> None:
        borders: Ints = np.cumsum([0, *(shard.num_tokens for shard in corpus.shards)], dtype=np.int64)
        self._begins, self._ends = borders[:-1], borders[1:]

    def pieces(self, row: Ints, column: Ints, start: Ints, length: Ints, segment: Ints, document: Ints) -> Pieces:
        """Split segments at shard borders and return their pieces, row after row. Arguments are int64 [segments], as in
        `Pieces`; `start` is counted through the corpus.
        """
        zeros = np.zeros(len(start), np.int64)
        if len(self._ends) == 1:
            return Pieces(row, column, zeros, start, length, segment, zeros, document)
        shard, stop = self._ends.searchsorted(start, side="right"), start + length
        if not (stop > self._ends[shard]).any():
            return Pieces(row, column, shard, start - self._begins[shard], length, segment, zeros, document)
        # Rare: a segment crosses a shard border. `of` is the segment of each piece.
        last_shard = self._ends.searchsorted(stop - 1, side="right")
        of, number = expand_counts(last_shard - shard + 1)
        shard = shard[of] + number
        begin, end = np.maximum(start[of], self._begins[shard]), np.minimum(stop[of], self._ends[shard])
        of, shard, begin, end = (each[end > begin] for each in (of, shard, begin, end))  # without empty shards
        position = begin - start[of]
        columns = row[of], column[of] + position, shard, begin - self._begins[shard], end - begin
        return Pieces(*columns, segment[of], position, document[of])


def expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """Return the row of each item, and its index in that row, int64 [items] each. Row i has `counts[i]` items: counts [2, 1]
    give rows [0, 0, 1] and indices [0, 1, 0]."""
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def join_parts(part: Ints, columns_of: Callable[[int, Ints], Sequence[Ints]]) -> list[Ints]:
    """Return the columns of rows that belong to several parts, sorted by row.

    Args:
      part: int64 [rows], part of each row; one row or more.
      columns_of: Function of a part and of `index`, int64 [n], the indices of its rows. It returns columns. Their first, "row",
        counts in `index`: 0 is the row `index[0]`.
    """
    by_part = []
    for number in np.unique(part).tolist():
        index = np.flatnonzero(part == number)
        row, *columns = columns_of(number, index)
        by_part.append((index[row], *columns))
    joined = [np.concatenate(column) for column in zip(*by_part, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return [column[order] for column in joined]


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
    """Return `index`; raise a `RowIndexError` for a -1 that does not come from a sampler, which writes it as a `FillKey`."""
    if index == FILL_ROW and not isinstance(index, FillKey):
        raise RowIndexError(
            f"row {index} of {layout!r}: expected 0 to {len(layout) - 1}. Rows don't count from the end."
        )
    return index
