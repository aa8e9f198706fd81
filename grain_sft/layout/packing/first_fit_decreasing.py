"""First-fit decreasing: documents, longest first, each go to the first row with space enough, or open a new one."""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingOptions, longest_first, rows_of


def first_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`."""
    order = longest_first(lengths, options)
    bins, count = assign(lengths[order], options.sequence_length, options.max_segments)
    return rows_of(order, lengths, bins, count)


def assign(
    lengths: Ints, capacity: int, max_segments: int | None = None, max_rows: int | None = None
) -> tuple[Ints, int]:
    """Return the row of each document, and the number of rows; stop at the first document that would need more than `max_rows`,
    with a greater number.

    Args:
      lengths: int64 [documents], each from 1 to `capacity`.
    """
    most, opened = max_segments or len(lengths), 0
    leaves = 1 << (min(len(lengths), max_rows or len(lengths)) - 1).bit_length()  # rows; each starts with all its space
    largest = [capacity] * (2 * leaves)  # space below each node of a binary tree; children of node n are 2n and 2n + 1
    segments = [0] * leaves
    bins: list[int] = []
    for length in lengths.tolist():
        if largest[1] < length:
            return np.array(bins, np.int64), leaves + 1
        node = 1
        while node < leaves:
            node += node
            if largest[node] < length:
                node += 1
        row = node - leaves
        bins.append(row)
        segments[row] += 1
        opened = max(opened, row + 1)
        if max_rows is not None and opened > max_rows:
            return np.array(bins, np.int64), opened
        space = largest[node] - length if segments[row] < most else 0
        largest[node] = space
        while node > 1:
            space = max(space, largest[node ^ 1])
            node >>= 1
            if largest[node] == space:
                break
            largest[node] = space
    return np.array(bins, np.int64), opened
