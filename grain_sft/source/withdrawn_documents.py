"""Search for the tokens of rows that are of withdrawn documents."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Layout, Pieces, expand_counts

Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max
_MOST_EXACT = 1 << 24  # documents, at a byte each


class WithdrawnDocuments:
    """Documents of one layout that are withdrawn, each from a step on.

    Args:
      layout: Layout of the rows.
      documents: int64 [n], numbers of documents in `layout`.
      steps: int64 [n], step from which each is withdrawn.
    """

    def __init__(self, layout: Layout, documents: Ints, steps: Ints) -> None:
        order = np.lexsort((steps, documents))
        documents, steps = documents[order], steps[order]
        once = np.append(True, documents[1:] > documents[:-1])  # the first step of each document counts
        self.layout = layout
        self._numbers: Ints = documents[once]
        self._steps: Ints = steps[once]
        if layout.follows_documents:
            # Rules out all other documents without a search, or nearly all where there are more than `_MOST_EXACT`.
            places = max(min(layout.num_documents, _MOST_EXACT), 16 * len(self._numbers))
            self._mask = (1 << places.bit_length()) - 1
            self._exact = layout.num_documents <= self._mask  # the last place, that of -1, is then of no document
            self._maybe = np.zeros(self._mask + 1, np.bool_)
            self._maybe[self._numbers & self._mask] = True
        else:
            start, length = (column[self._numbers] for column in layout.corpus.documents)
            self._starts, self._stops, self._steps = _disjoint(start, start + length, self._steps)
            self._shards = np.cumsum([0, *(shard.num_tokens for shard in layout.corpus.shards)])

    def parts(self, pieces: Pieces) -> tuple[Ints, Ints | int, Ints, Ints]:
        """Return the parts of `pieces` that are withdrawn at some step, int64 [n] each: index of the piece, first token counted
        from the piece's (0 for that of each), length, and number of the withdrawn document or span, for `since`."""
        if self.layout.follows_documents:
            assert pieces.document is not None
            at = self.pieces(pieces.document, self.last_step)
            return at, 0, pieces.length[at], pieces.document[at]
        begin = self._shards[pieces.shard] + pieces.start
        end = begin + pieces.length
        low = self._stops.searchsorted(begin, side="right")
        at, number = expand_counts(self._starts.searchsorted(end) - low)
        span, begin = low[at] + number, begin[at]
        first = np.maximum(self._starts[span], begin)
        return at, first - begin, np.minimum(self._stops[span], end[at]) - first, span

    def pieces(self, document: Ints, step: int) -> Ints:
        """Return the indices of the pieces of documents `document`, int64 [n], that are withdrawn at `step`."""
        at: Ints = self._maybe[document if self._exact else document & self._mask].nonzero()[0]
        if not self._exact:
            at = at[np.isin(document[at], self._numbers)]
        return at if step >= self.last_step else at[self.since(document[at]) <= step]

    def spans(self, pieces: Pieces, step: int, length: int) -> tuple[Ints, Ints, Ints]:
        """Return the spans of `pieces` that are withdrawn at `step`, int64 [n] each: index of the piece, and start and stop in
        the flattened rows of `length` tokens."""
        piece, first, count, number = self.parts(pieces)
        if step < self.last_step:
            kept = np.flatnonzero(self.since(number) <= step)
            piece, first, count = piece[kept], first if isinstance(first, int) else first[kept], count[kept]
        start = pieces.row[piece] * length + pieces.column[piece] + first
        return piece, start, start + count

    def listed_spans(self, pieces: Pieces, step: int, length: int) -> list[tuple[int, int]]:
        """Return the starts and stops of `spans`. For a few pieces with a few spans each, loops are faster than arrays."""
        if self.layout.follows_documents or step < self.last_step:
            _, start, stop = self.spans(pieces, step, length)
            return list(zip(start.tolist(), stop.tolist(), strict=True))
        begin = self._shards[pieces.shard] + pieces.start
        end, place = begin + pieces.length, pieces.row * length + pieces.column - begin
        low, high = self._stops.searchsorted(begin, side="right").tolist(), self._starts.searchsorted(end).tolist()
        found = []
        for number, (first, last) in enumerate(zip(low, high)):  # noqa: B905
            if first < last:
                begins, ends = self._starts[first:last].tolist(), self._stops[first:last].tolist()
                begins[0], ends[-1] = max(begins[0], begin.item(number)), min(ends[-1], end.item(number))
                moved = place.item(number)
                found += [(one + moved, other + moved) for one, other in zip(begins, ends)]  # noqa: B905
        return found

    def since(self, numbers: Ints) -> Ints:
        """Return the step from which each of the documents or spans `numbers`, int64 [n], is withdrawn."""
        return self._steps[self._numbers.searchsorted(numbers) if self.layout.follows_documents else numbers]

    def segments_of(self, row: int, step: int) -> list[int]:
        """Return the indices of the segments of `row`, as `layout.row_segments` returns them, that are withdrawn at `step`."""
        assert self.layout.row_documents is not None
        documents, maybe = self.layout.row_documents(row), self._maybe.data
        if self._exact and step >= self.last_step:
            return [number for number, document in enumerate(documents) if maybe[document]]
        found: list[int] = self.pieces(np.array(documents, np.int64), step).tolist()
        return found

    @functools.cached_property
    def in_row(self) -> npt.NDArray[np.bool_]:
        """Whether each row has tokens of a document that is withdrawn at some step: bool [rows]."""
        found = np.zeros(len(self.layout), np.bool_)
        found[self.layout.rows_of_documents(self._numbers)] = True
        return found

    @functools.cached_property
    def last_step(self) -> int:
        """Step from which all documents are withdrawn."""
        return int(self._steps.max(initial=0))


def _disjoint(starts: Ints, stops: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ascending spans of the same tokens that do not overlap, and the step from which each is withdrawn, the first if
    there are several. Documents of some formats are in any order, share tokens, or have none."""
    if (starts < stops).all() and (stops[:-1] <= starts[1:]).all():  # saves 10 MB for 100,000 documents
        return starts, stops, steps
    borders = np.sort(np.concatenate([starts, stops]))
    low, high = borders.searchsorted(starts), borders.searchsorted(stops)
    of, number = expand_counts(high - low)
    since = np.full(len(borders), _NEVER)
    np.minimum.at(since, low[of] + number, steps[of])
    kept = np.flatnonzero((since[:-1] < _NEVER) & (borders[1:] > borders[:-1]))
    return borders[kept], borders[kept + 1], since[kept]


class WithdrawnAtStep(NamedTuple):
    """Documents that are withdrawn at a step, of a layout that follows documents.

    Attributes:
      documents: Documents that are withdrawn at some step.
      step: The step.
    """

    documents: WithdrawnDocuments
    step: int

    def pieces(self, pieces: Pieces) -> Ints:
        """Return the indices of those of `pieces` that are of withdrawn documents."""
        assert pieces.document is not None
        return self.documents.pieces(pieces.document, self.step)

    def columns(self, rows: Ints, ends: Sequence[Sequence[int]]) -> list[Sequence[tuple[int, int]]]:
        """Return, for each of `rows`, the first column and the one after the last of each segment of a withdrawn document.
        `ends` are the columns after the segments of each row, which `layout.row_segments` returns."""
        columns: list[Sequence[tuple[int, int]]] = [()] * len(rows)
        for at in self.documents.in_row[rows].nonzero()[0].tolist():
            segments = self.documents.segments_of(int(rows[at]), self.step)
            columns[at] = [(ends[at][number - 1] if number else 0, ends[at][number]) for number in segments]
        return columns
