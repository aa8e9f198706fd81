"""Shuffled best fit: each epoch is packed anew, from a seeded shuffle in chunks, so that documents meet other neighbours and
rows come in a random order. It takes a plan for each epoch, and some more padding than packing everything at once: a percent
or two of some hundred rows, some tenths from thousands on, hundredths where chunks reach 65,536 documents."""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingAlgorithm, PackingOptions, join_rows, rows_of
from grain_sft.layout.packing.best_fit_decreasing import assign

# Best fit goes by length alone: documents of one chunk with lengths of their own meet again whenever they share a chunk. With
# 16 chunks of at least 32 rows, one to four rows in a hundred are the same in two epochs; with one chunk, up to nine in ten.
_CHUNKS = 16
_LEAST_ROWS = 32


def shuffled_best_fit(lengths: Ints, options: PackingOptions, most: int = 1 << 16) -> PackedRows:
    """Pack documents of `lengths` anew for (seed, epoch), at most `most` of them together."""
    capacity = options.sequence_length
    draw = np.random.Generator(np.random.PCG64([options.seed, options.epoch]))
    order = draw.permutation(len(lengths))
    chunks = min(_CHUNKS, max(2, int(lengths.sum()) // (capacity * _LEAST_ROWS)))
    chunk = max(1, min(most, -(-len(order) // chunks)))
    packed = []
    for begin in range(0, len(order), chunk):
        some = order[begin : begin + chunk]
        some = some[np.argsort(-lengths[some], kind="stable")]
        bins, rows = assign(lengths[some], capacity, options.max_segments)
        packed.append(rows_of(some, lengths, draw.permutation(rows)[bins], rows))  # rows of a chunk in a random order
    return join_rows(packed)


SHUFFLED_BEST_FIT = PackingAlgorithm(shuffled_best_fit, packs_per_epoch=True)
