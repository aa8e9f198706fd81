"""Shuffled best fit: each epoch is packed anew, from a seeded shuffle in chunks, so that no two epochs have the same rows.

Advantages: documents meet other neighbours in every epoch, and rows come in a random order, so they are read as they are
numbered. Disadvantages: some more padding than packing everything at once (a chunk of 65,536 documents leaves some
hundredths of a percent), and a plan for each epoch.
"""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.best_fit_decreasing import assign
from grain_sft.layout.packing.rows import Ints, PackOptions, Rows


def shuffled_best_fit(lengths: Ints, capacity: int, options: PackOptions) -> Rows:
    """Pack documents of `lengths`, each at most `capacity`, anew for (seed, epoch)."""
    draw = np.random.Generator(np.random.PCG64([options.seed, options.epoch]))
    order = draw.permutation(len(lengths))
    documents, counts = [], []
    for begin in range(0, len(order), options.chunk):
        some = order[begin : begin + options.chunk]
        some = some[np.argsort(-lengths[some], kind="stable")]
        bins, rows = assign(lengths[some], capacity, options.max_segments)
        bins = draw.permutation(rows)[bins]  # rows of a chunk in a random order
        placed = np.argsort(bins, kind="stable")
        documents.append(some[placed])
        counts.append(np.bincount(bins, minlength=rows))
    document = np.concatenate([np.zeros(0, np.int64), *documents])
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]))
    return Rows(document, np.zeros(len(document), np.int64), lengths[document], ends)
