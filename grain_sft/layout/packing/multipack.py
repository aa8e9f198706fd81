"""OpenChat's multipack (ochat/training_deepspeed/multipack_sampler.py): batches of `batch_rows` rows, each batch the
longest prefix of a shuffled order that first-fit decreasing packs into so many rows.

Row r of batch b is row `b * batch_rows + r`. Documents after the last whole batch of an epoch are left out.
"""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions
from grain_sft.layout.packing.first_fit_decreasing import assign

_FEW = 384  # rows: up to here a plain loop is faster than arrays of spaces


def multipack(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths` in the order of (seed, epoch)."""
    order = np.random.default_rng(options.seed + options.epoch).permutation(len(lengths))
    shuffled = lengths[order]
    totals = np.cumsum(shuffled)
    rows, capacity = options.batch_rows, options.sequence_length
    documents, bins, batches, start = [], [], 0, 0
    while True:
        count = _longest_prefix(shuffled, totals, start, capacity, rows)
        some = shuffled[start : start + count]
        decreasing = np.argsort(some, kind="stable")[::-1]
        placed = _place(some[decreasing].tolist(), capacity, rows) if rows <= _FEW else None
        if placed is None:
            placed = assign(some[decreasing], capacity)[0].tolist()
        if len(set(placed)) < rows:
            break
        documents.append(order[start + decreasing])
        bins.append(np.array(placed, np.int64) + batches * rows)
        batches, start = batches + 1, start + count
    if not batches:
        nothing = np.zeros(0, np.int64)
        return PackedRows(nothing, nothing, nothing, nothing)
    document, of_row = np.concatenate(documents), np.concatenate(bins)
    document = document[np.argsort(of_row, kind="stable")]
    ends = np.cumsum(np.bincount(of_row, minlength=batches * rows))
    return PackedRows(document, np.zeros(len(document), np.int64), lengths[document], ends)


MULTIPACK = PackingAlgorithm(
    multipack,
    packs_per_epoch=True,
    whole_batches=True,
    bounds_segments=False,
    order="openchat",
    slow=True,
)


def _longest_prefix(lengths: Ints, totals: Ints, start: int, capacity: int, rows: int) -> int:
    """The number of documents from `start` on of which a bisection finds that they fit into `rows` rows; at least 1."""
    before = int(totals[start - 1]) if start else 0
    low, high = 1, 1 + int(np.searchsorted(totals[start:], before + capacity * rows, side="right"))
    while high - low > 1:
        middle = (low + high) // 2
        decreasing = np.sort(lengths[start : start + middle])[::-1]
        if rows <= _FEW:
            fits = _place(decreasing.tolist(), capacity, rows) is not None
        else:
            fits = assign(decreasing, capacity, max_rows=rows)[1] <= rows
        if fits:
            low = middle
        else:
            high = middle
    return low


def _place(decreasing: list[int], capacity: int, rows: int) -> list[int] | None:
    """The row of each document by first fit; None where they don't fit. For few rows."""
    spaces = [capacity] * rows
    placed = []
    for length in decreasing:
        for row, space in enumerate(spaces):
            if space >= length:
                spaces[row] = space - length
                placed.append(row)
                break
        else:
            return None
    return placed
