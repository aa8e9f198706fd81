"""Shuffled best fit: each epoch is packed anew, from a seeded shuffle in chunks, so that no two epochs have the same rows.

Advantages: documents meet other neighbours in every epoch, and rows come in a random order, so they are read as they are
numbered. Disadvantages: a plan for each epoch, and some more padding than packing everything at once.

Best fit goes by length alone, so documents of one chunk that have lengths of their own meet again whenever they share a
chunk. Hence many chunks, though not so small that they pad much: 16 of at least 32 rows each. That leaves one to four
rows in a hundred that two epochs have in common (with one chunk, up to nine in ten). It pads a percent or two where there
are some hundred rows, some tenths of a percent from thousands on, and hundredths where chunks reach 65,536 documents.
"""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions
from grain_sft.layout.packing.best_fit_decreasing import assign

_CHUNKS = 16
_LEAST_ROWS = 32  # of a chunk


def shuffled_best_fit(lengths: Ints, options: PackingOptions, most: int = 1 << 16) -> PackedRows:
    """Pack documents of `lengths` anew for (seed, epoch), at most `most` of them together."""
    capacity = options.sequence_length
    draw = np.random.Generator(np.random.PCG64([options.seed, options.epoch]))
    order = draw.permutation(len(lengths))
    chunks = min(_CHUNKS, max(2, int(lengths.sum()) // (capacity * _LEAST_ROWS)))
    chunk = min(most, -(-len(order) // chunks))
    documents, counts = [], []
    for begin in range(0, len(order), max(1, chunk)):
        some = order[begin : begin + chunk]
        some = some[np.argsort(-lengths[some], kind="stable")]
        bins, rows = assign(lengths[some], capacity, options.max_segments)
        bins = draw.permutation(rows)[bins]  # rows of a chunk in a random order
        placed = np.argsort(bins, kind="stable")
        documents.append(some[placed])
        counts.append(np.bincount(bins, minlength=rows))
    document = np.concatenate([np.zeros(0, np.int64), *documents])
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *counts]))
    return PackedRows(document, np.zeros(len(document), np.int64), lengths[document], ends)


SHUFFLED_BEST_FIT = PackingAlgorithm(shuffled_best_fit, packs_per_epoch=True)
