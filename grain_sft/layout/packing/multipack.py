"""OpenChat's multipack (ochat/training_deepspeed/multipack_sampler.py), which packs shuffled documents batch by batch.

A batch has as many of the next documents as first-fit decreasing can pack into `batch_rows` rows. Row r of batch b is row
`b * batch_rows + r` of the epoch. Documents after the last full batch are left out.
"""

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingAlgorithm, PackingOptions, join_rows, rows_of
from grain_sft.layout.packing.first_fit_decreasing import assign
from grain_sft.types import Ints


def multipack(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Return the rows of the documents, which are shuffled by seed and epoch. `lengths` is int64 [documents]."""
    order = np.random.default_rng(options.seed + options.epoch).permutation(len(lengths))
    shuffled = lengths[order]
    totals = np.cumsum(shuffled)
    rows, capacity = options.batch_rows, options.sequence_length
    batches: list[PackedRows] = []
    start = 0
    while True:
        tokens_before = int(totals[start - 1]) if start else 0
        # Bisection for the greatest number of documents that fit into the batch. `fit` documents fit, and `too_many` documents
        # do not. At first, `too_many` documents have more tokens than a batch, or are more than the documents that are left.
        fit = 1  # every document fits into an empty row; if no document is left, the batch is empty
        too_many = 1 + int(np.searchsorted(totals[start:], tokens_before + capacity * rows, side="right"))
        while too_many - fit > 1:
            middle = (fit + too_many) // 2
            if len(assign(np.sort(shuffled[start : start + middle])[::-1], capacity, middle, rows)) == middle:
                fit = middle
            else:
                too_many = middle
        decreasing = start + np.argsort(shuffled[start : start + fit], kind="stable")[::-1]
        bins = assign(shuffled[decreasing], capacity, fit, rows)
        # a row of the batch is empty, because all documents that are left fit into fewer rows
        if len(bins) < len(decreasing) or len(np.unique(bins)) < rows:
            return join_rows(batches)
        batches.append(rows_of(order[decreasing], lengths, bins))
        start += fit


MULTIPACK = PackingAlgorithm(multipack, packs_per_epoch=True, whole_batches=True, bounds_segments=False, order="openchat")
