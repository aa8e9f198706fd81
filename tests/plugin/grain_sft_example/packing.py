"""A packing algorithm of the plugin: next fit."""

import numpy as np

from grain_sft.layout.packing import PackedRows, PackingOptions


def next_fit(lengths: np.ndarray, options: PackingOptions) -> PackedRows:
    """Pack documents in their order. A document that does not fit begins the next row."""
    ends, used, segments = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        if used + length > options.sequence_length or segments == options.max_segments:
            ends.append(number)
            used = segments = 0
        used, segments = used + length, segments + 1
    numbers = np.arange(len(lengths))
    return PackedRows(numbers, np.zeros_like(numbers), lengths, np.array([*ends, len(lengths)], np.int64))
