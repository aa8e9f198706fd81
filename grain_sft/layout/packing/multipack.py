"""OpenChat's multipack (ochat/training_deepspeed/multipack_sampler.py), which packs shuffled documents batch by batch.

Each batch is the longest prefix of the remaining documents that first-fit decreasing packs into `batch_rows` rows. Row r of
batch b is row `b * batch_rows + r` of the epoch. Documents after its last full batch are left out.
"""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions, join_rows, rows_of
from grain_sft.layout.packing.first_fit_decreasing import assign

_FEW = 32  # rows up to which a plain loop is faster than the tree of `assign`


def multipack(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`, shuffled by seed and epoch."""
    order = np.random.default_rng(options.seed + options.epoch).permutation(len(lengths))
    shuffled = lengths[order]
    totals = np.cumsum(shuffled)
    rows, capacity = options.batch_rows, options.sequence_length
    batches: list[PackedRows] = []
    start = 0
    while True:
        count = _longest_prefix(shuffled, totals, start, capacity, rows)
        batch = shuffled[start : start + count]
        decreasing = np.argsort(batch, kind="stable")[::-1]
        bins = _place(batch[decreasing], capacity, rows)
        if bins is None or len(np.unique(bins)) < rows:
            return join_rows(batches)
        batches.append(rows_of(order[start + decreasing], lengths, bins, rows))
        start += count


MULTIPACK = PackingAlgorithm(
    multipack, packs_per_epoch=True, whole_batches=True, bounds_segments=False, order="openchat", slow=True
)


def _longest_prefix(lengths: Ints, totals: Ints, start: int, capacity: int, rows: int) -> int:
    """Return the number of documents from `start` on that fit into `rows` rows, found by bisection; at least 1."""
    before = int(totals[start - 1]) if start else 0
    low, high = 1, 1 + int(np.searchsorted(totals[start:], before + capacity * rows, side="right"))
    while high - low > 1:
        middle = (low + high) // 2
        if _place(np.sort(lengths[start : start + middle])[::-1], capacity, rows) is None:
            high = middle
        else:
            low = middle
    return low


def _place(decreasing: Ints, capacity: int, rows: int) -> Ints | None:
    """Return the row of each document by first fit; None where they don't fit into `rows` rows."""
    if rows > _FEW:
        bins, count = assign(decreasing, capacity, max_rows=rows)
        return bins if count <= rows else None
    spaces = [capacity] * rows
    placed = []
    for length in decreasing.tolist():
        for row, space in enumerate(spaces):
            if space >= length:
                spaces[row] = space - length
                placed.append(row)
                break
        else:
            return None
    return np.array(placed, np.int64)
