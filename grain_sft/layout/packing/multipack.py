"""OpenChat's multipack (ochat/training_deepspeed/multipack_sampler.py), which packs shuffled documents batch by batch.

Each batch is the longest prefix of the remaining documents that first-fit decreasing packs into `batch_rows` rows. Row r of
batch b is row `b * batch_rows + r` of the epoch. Documents after the last full batch are left out.
"""

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions, join_rows, rows_of
from grain_sft.layout.packing.first_fit_decreasing import assign

_FEW = 32  # rows up to which a plain loop is faster than the tree of `assign`


def multipack(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Return the rows of documents of these lengths, shuffled by seed and epoch."""
    order = np.random.default_rng(options.seed + options.epoch).permutation(len(lengths))
    shuffled = lengths[order]
    totals = np.cumsum(shuffled)
    rows, capacity = options.batch_rows, options.sequence_length
    batches: list[PackedRows] = []
    start = 0
    while True:
        before = int(totals[start - 1]) if start else 0
        low, high = 1, 1 + int(np.searchsorted(totals[start:], before + capacity * rows, side="right"))
        while high - low > 1:  # bisection: `low` documents fit, `high` do not
            middle = (low + high) // 2
            bins = _place(np.sort(shuffled[start : start + middle])[::-1], capacity, rows)
            low, high = (middle, high) if len(bins) == middle else (low, middle)
        decreasing = start + np.argsort(shuffled[start : start + low], kind="stable")[::-1]
        bins = _place(shuffled[decreasing], capacity, rows)
        if len(bins) < len(decreasing) or len(np.unique(bins)) < rows:
            return join_rows(batches)
        batches.append(rows_of(order[decreasing], lengths, bins))
        start += low


def _place(decreasing: Ints, capacity: int, rows: int) -> Ints:
    """Return the row of each document by first fit, or fewer values where the documents don't fit into `rows` rows."""
    if rows > _FEW:
        return assign(decreasing, capacity, len(decreasing), rows)
    spaces, placed = [capacity] * rows, []
    for length in decreasing.tolist():
        for row, space in enumerate(spaces):
            if space >= length:
                spaces[row] = space - length
                placed.append(row)
                break
        else:
            break
    return np.array(placed, np.int64)


MULTIPACK = PackingAlgorithm(
    multipack, packs_per_epoch=True, whole_batches=True, bounds_segments=False, order="openchat"
)
