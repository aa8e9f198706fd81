"""The tokens of rows, as parts of shards. A `Span` is a part of one row. `Pieces` are the parts of many rows, as arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.corpus import Corpus, Documents
from grain_sft.errors import LayoutError
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64

LeftOut = tuple[str, int | None, int | None]
"""Line of a report on left-out documents or padding: a tuple (name, number of documents, number of tokens), such as
("dropped pairs", 2, 900). None means that the line has no such number: padding is in no document."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Consecutive tokens of one shard in one row. A segment that crosses a shard border has a span in each shard.

    Attributes:
      shard: Number of the shard in `corpus.shards`.
      start, stop: Token offsets in the shard: of the span's first token, and of the token after its last.
      document: Number of the document in `layout.documents`; None if the layout states no documents, or if the span is outside
        all documents.
    """

    shard: int
    start: int
    stop: int
    document: int | None


class Pieces(NamedTuple):
    """Spans of many rows, row after row, as arrays. Entry i of each array belongs to piece i, which is one span.

    The pieces of a row fill it from column 0 on, without gaps. The rest of the row is padding.

    Attributes:
      row: Row of the piece, as an index into the argument `rows` of `Layout.pieces`.
      column: Column of the piece's first token in its row.
      shard: Number of the shard in `corpus.shards`.
      start: Token offset of the piece's first token in the shard.
      length: Number of tokens of the piece.
      segment: Number of the piece's segment in its row, from 1. None if each row is one segment without padding.
      position: Position of the piece's first token in its segment. None if `segment` is None.
      document: Number of the document in `layout.documents`; -1 for a piece outside all documents. None if the layout states no
        documents.
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
        """Return the token offset of each piece in the flattened rows, which have `length` tokens each."""
        offsets: Ints = self.row * length + self.column
        return offsets

    @property
    def segments_and_positions(self) -> tuple[Ints, Ints]:
        """Pair (`segment`, `position`), int64 [pieces] each. If these are None, segments are 1, and positions are columns."""
        if self.segment is None or self.position is None:
            return np.ones(len(self.row), np.int64), self.column
        return self.segment, self.position

    @property
    def segment_begins(self) -> Ints:
        """Index of the first piece of each segment of each row, int64 [segments]."""
        segment = self.segments_and_positions[0]
        begins = (self.row[1:] != self.row[:-1]) | (segment[1:] != segment[:-1])
        return np.flatnonzero(np.append(True, begins)[: len(self.row)])  # the slice is empty if there are no pieces


def pieces_of(corpus: Corpus, row: Ints, column: Ints, start: Ints, length: Ints, segment: Ints, document: Ints) -> Pieces:
    """Return the pieces of segments. A segment that crosses a shard border becomes several pieces.

    The arguments after `corpus` are int64 [segments], with the meaning of the attributes of `Pieces`. But `start` is the token
    offset in the corpus, not in the shard.
    """
    begins, ends = corpus.shard_borders[:-1], corpus.shard_borders[1:]
    shard, stop = ends.searchsorted(start, side="right"), start + length
    if not (stop > ends[shard]).any():
        position = np.zeros(len(start), np.int64)
        return Pieces(row, column, shard, start - begins[shard], length, segment, position, document)
    # rare: a segment crosses a shard border
    last_shard = ends.searchsorted(stop - 1, side="right")
    parent, number = expand_counts(last_shard - shard + 1)  # `parent` is the index of the piece's segment
    shard = shard[parent] + number
    begin = np.maximum(start[parent], begins[shard])
    end = np.minimum(stop[parent], ends[shard])
    has_tokens = end > begin  # False where the segment passes over an empty shard
    parent, shard, begin, end = (values[has_tokens] for values in (parent, shard, begin, end))
    position = begin - start[parent]
    columns = row[parent], column[parent] + position, shard, begin - begins[shard], end - begin
    return Pieces(*columns, segment[parent], position, document[parent])


def check_documents(documents: Documents) -> Documents:
    """Return `documents`. Raise a LayoutError if none of them has a token."""
    if not documents.length.any():
        raise LayoutError("no document of the corpus has a token. Check its eos_token_id.")
    return documents


def groups(numbers: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each distinct number, ascending, with its indices, int64 [n]: (4, [1]) and (7, [0, 2]) for [7, 4, 7]."""
    for number in sorted(set(numbers.tolist())):  # takes 1.3 us for 32 numbers; np.unique takes 6.6 us
        yield number, np.flatnonzero(numbers == number)


def expand_counts(counts: Ints) -> tuple[Ints, Ints]:
    """Return the row of each item, int64 [items], and the item's index in the row, int64 [items].

    `counts` has the number of items in each row. With counts [2, 1], the rows are [0, 0, 1], and the indices are [0, 1, 0].
    """
    row = np.arange(len(counts)).repeat(counts)
    return row, np.arange(len(row)) - (counts.cumsum() - counts)[row]


def join_parts(part: Ints, columns_of: Callable[[int, Ints], Sequence[Ints]]) -> list[Ints]:
    """Join the pieces of several parts, such as the sources of a mixture, and sort them by row.

    Here, the pieces of a part are a list of arrays with one value for each piece. The first array of the result has the row of
    each piece, as an index into `part`.

    Args:
      part: int64 [rows], number of the part that each row is in. Without rows, the arrays are those of part 0, all empty.
      columns_of: Function (number, rows) that returns the arrays of the part with this number. The argument `rows`, int64
        [n], has indices into `part`. The first array that the function returns has indices into `rows`, which `join_parts`
        converts to indices into `part`.
    """
    by_part = []
    for number, index in list(groups(part)) or [(0, part)]:
        row, *columns = columns_of(number, index)
        by_part.append((index[row], *columns))
    joined = [np.concatenate(column) for column in zip(*by_part, strict=True)]
    order = np.argsort(joined[0], kind="stable")
    return [column[order] for column in joined]
