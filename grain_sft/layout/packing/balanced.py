"""Balanced packing: rows of nearly equal attention cost, so that no device waits for a device with a more expensive row.

The cost of a row is the sum of the squares of its documents' lengths. The algorithm opens as many rows as the tokens fill. The
longest documents, with 70% of all tokens (50% in a second try), are the long documents. The algorithm places them in rounds,
longest first. In the first round, every row gets one document. In each later round, the cheaper half of the rows that have
space for the shortest long document gets one document each: the cheapest row gets the longest document, and so on. A row
without space for its document gets no document in that round. At the end, best fit places the documents that have no row yet.
"""

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingAlgorithm, PackingOptions, longest_first, rows_of
from grain_sft.layout.packing.best_fit_decreasing import assign
from grain_sft.types import Ints

_SHORT = (0.3, 0.5)
"""Share of all tokens that are in short documents. If 0.3 leaves more padding than `_PADDING`, the algorithm tries 0.5."""
_PADDING = 0.005  # highest accepted share of padding in the rows


def balanced(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`. If balanced rows have too much padding, use best fit alone."""
    order, capacity = longest_first(lengths, options), options.sequence_length
    decreasing = lengths[order]
    full_rows = decreasing.sum() / capacity  # number of rows if none had padding
    for share in _SHORT:
        bins = _assign(decreasing, capacity, share)
        if full_rows >= (1 - _PADDING) * (bins.max() + 1):
            return rows_of(order, lengths, bins)
    return rows_of(order, lengths, assign(decreasing, capacity))


def _assign(lengths: Ints, capacity: int, short: float) -> Ints:
    """Return the row of each document, int64 [documents]. `short` is the share of all tokens in short documents.

    `lengths` is int64 [documents], longest first.
    """
    totals = np.cumsum(lengths)
    num_long = int(np.searchsorted(totals, totals[-1] * (1 - short))) + 1
    num_rows = min(-(-int(totals[-1]) // capacity), num_long)  # each row gets a long document in the first round
    bins = np.full(len(lengths), -1)
    costs = np.zeros(num_rows, np.int64)
    spaces = np.full(num_rows, capacity)
    first = 0
    rows = np.arange(num_rows)  # the round's rows, cheapest first
    while first < num_long and len(rows):
        documents = np.arange(first, min(first + len(rows), num_long))
        first += len(documents)
        fits = spaces[rows[: len(documents)]] >= lengths[documents]
        placed, used = documents[fits], rows[: len(documents)][fits]
        bins[placed] = used
        costs[used] += np.square(lengths[placed])
        spaces[used] -= lengths[placed]
        has_space = np.flatnonzero(spaces >= lengths[num_long - 1])  # rows with space for the shortest long document
        by_cost = has_space[np.argsort(costs[has_space], kind="stable")]
        rows = by_cost[: (len(by_cost) + 1) // 2]
    unplaced = np.flatnonzero(bins < 0)
    bins[unplaced] = assign(lengths[unplaced], capacity, spaces=spaces)
    return bins


BALANCED = PackingAlgorithm(balanced, bounds_segments=False)
