"""Search for the tokens of rows that are of withdrawn documents."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Layout, Pieces, expand_counts

Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


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
            self._is_withdrawn = np.zeros(layout.num_documents + 1, np.bool_)  # the last is that of -1, no document
            self._is_withdrawn[self._numbers] = True
        else:
            start, length = (column[self._numbers] for column in layout.corpus.documents)
            self._starts, self._stops, self._steps = _disjoint(start, start + length, self._steps)
            self._shards = np.cumsum([0, *(shard.num_tokens for shard in layout.corpus.shards)])

    def parts(self, pieces: Pieces) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the parts of `pieces` that are withdrawn at some step, int64 [n] each: index of the piece, first token counted
        from the piece's, length, and step from which the part is withdrawn."""
        if pieces.document is not None:
            piece = self._is_withdrawn[pieces.document].nonzero()[0]
            steps = self._steps[self._numbers.searchsorted(pieces.document[piece])]
            return piece, np.zeros_like(piece), pieces.length[piece], steps
        begin = self._shards[pieces.shard] + pieces.start
        end = begin + pieces.length
        low = self._stops.searchsorted(begin, side="right")
        piece, number = expand_counts(self._starts.searchsorted(end) - low)
        span, begin = low[piece] + number, begin[piece]
        first = np.maximum(self._starts[span], begin)
        return piece, first - begin, np.minimum(self._stops[span], end[piece]) - first, self._steps[span]

    def spans(self, pieces: Pieces, step: int, length: int) -> tuple[Ints, Ints, Ints]:
        """Return the spans of `pieces` that are withdrawn at `step`, int64 [n] each: index of the piece, and start and stop in
        the flattened rows of `length` tokens."""
        piece, first, count, since = self.parts(pieces)
        start = pieces.offsets(length)[piece] + first
        now = since <= step
        return piece[now], start[now], (start + count)[now]

    @functools.cached_property
    def in_row(self) -> npt.NDArray[np.bool_]:
        """Whether each row has tokens of a document that is withdrawn at some step: bool [rows]."""
        found = np.zeros(len(self.layout), np.bool_)
        found[self.layout.rows_of_documents(self._numbers)] = True
        return found


def _disjoint(starts: Ints, stops: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ascending spans of the same tokens that do not overlap, and the step from which each is withdrawn, the first if
    there are several. Documents of some formats are in any order, share tokens, or have none."""
    borders = np.sort(np.concatenate([starts, stops]))
    low, high = borders.searchsorted(starts), borders.searchsorted(stops)
    of, number = expand_counts(high - low)
    since = np.full(len(borders), _NEVER)
    np.minimum.at(since, low[of] + number, steps[of])
    kept = np.flatnonzero((since[:-1] < _NEVER) & (borders[1:] > borders[:-1]))
    return borders[kept], borders[kept + 1], since[kept]
