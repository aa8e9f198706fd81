"""Balanced packing: rows whose attention costs the same, as far as single long documents allow it.

The cost of a row is the sum of the squares of its documents' lengths. The algorithm opens as many rows as the tokens fill, and
places long documents in rounds, longest first. In the first round, every row gets one document. In each later round, the half
of the rows that costs less gets one each, and the row that costs least gets the longest. Best fit then places the short
documents, which cost little and fill any space.
"""

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingAlgorithm, PackingOptions, longest_first, rows_of
from grain_sft.layout.packing.best_fit_decreasing import assign
from grain_sft.types import Ints

_SHORT = (0.3, 0.5)
"""Share of the tokens that is in "short" documents. If 0.3 leaves more padding than `_PADDING`, 0.5 is tried."""
_PADDING = 0.005  # most padding, as a share of all rows


def balanced(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`. If they are too few or too long to fill balanced rows, the rows are those of best fit."""
    order, capacity = longest_first(lengths, options), options.sequence_length
    decreasing = lengths[order]
    full_rows = decreasing.sum() / capacity
    for share in _SHORT:
        bins = _assign(decreasing, capacity, share)
        if full_rows >= (1 - _PADDING) * (bins.max() + 1):
            return rows_of(order, lengths, bins)
    return rows_of(order, lengths, assign(decreasing, capacity))


def _assign(lengths: Ints, capacity: int, short: float) -> Ints:
    """Return the row of each document, int64 [documents].

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
      short: Share of the tokens that best fit places.
    """
    totals = np.cumsum(lengths)
    end = int(np.searchsorted(totals, totals[-1] * (1 - short))) + 1  # number of long documents
    count = min(-(-int(totals[-1]) // capacity), end)
    bins = np.full(len(lengths), -1)
    costs, spaces = np.zeros(count, np.int64), np.full(count, capacity)  # of each row
    begin, rows = (
        0,
        np.arange(count),
    )  # first document of the round, and the rows that get one, those of least cost first
    while begin < end and len(rows):
        documents = np.arange(begin, min(begin + len(rows), end))
        begin += len(rows)
        rows = rows[: len(documents)]
        fits = spaces[rows] >= lengths[documents]
        rows, documents = rows[fits], documents[fits]
        bins[documents] = rows
        costs[rows] += np.square(lengths[documents])
        spaces[rows] -= lengths[documents]
        rows = np.flatnonzero(spaces >= lengths[end - 1])
        rows = rows[np.argsort(costs[rows], kind="stable")[: (len(rows) + 1) // 2]]
    unplaced = np.flatnonzero(bins < 0)
    bins[unplaced] = assign(lengths[unplaced], capacity, spaces=spaces)
    return bins


BALANCED = PackingAlgorithm(balanced, bounds_segments=False)
