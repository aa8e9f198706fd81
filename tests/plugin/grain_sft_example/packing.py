"""A packing algorithm of its own: next fit."""

import numpy as np

from grain_sft.layout.packing import PackedRows, PackingOptions


def next_fit(lengths: np.ndarray, options: PackingOptions) -> PackedRows:
    """Pack documents in their order; a document that does not fit begins the next row."""
    ends, used, held = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        if used + length > options.sequence_length or held == options.max_segments:
            ends.append(number)
            used = held = 0
        used, held = used + length, held + 1
    numbers = np.arange(len(lengths))
    return PackedRows(numbers, np.zeros_like(numbers), lengths, np.array([*ends, len(lengths)], np.int64))
