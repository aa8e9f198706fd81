"""First-fit decreasing: documents, longest first, each go to the first row with space enough, or open a new one."""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingOptions, equal_lengths, longest_first, rows_of

_BLOCK = 512  # rows whose largest space is known together


def first_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`."""
    order = longest_first(lengths, options)
    bins, count = assign(lengths[order], options.sequence_length, options.max_segments)
    return rows_of(order, lengths, bins, count)


def assign(
    lengths: Ints, capacity: int, max_segments: int | None = None, max_rows: int | None = None
) -> tuple[Ints, int]:
    """The row of each document, and the number of rows; stops after the first document that would need more than
    `max_rows`, with `max_rows + 1`.

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
    """
    rows = _Rows(len(lengths), capacity, max_segments)
    bins: Ints = np.empty(len(lengths), np.int64)
    for length, first, end in equal_lengths(lengths):
        position = rows.fill(length, first, end, bins)
        if position < end:
            position = rows.open(length, position, end, bins)
        if max_rows is not None and rows.opened > max_rows:
            return bins, max_rows + 1
    return bins, rows.opened


class _Rows:
    """Spaces of the rows that are open, and the largest of each block of them."""

    def __init__(self, documents: int, capacity: int, max_segments: int | None) -> None:
        blocks = -(-documents // _BLOCK)
        self.opened = 0
        self._capacity = capacity
        self._most = max_segments
        self._spaces: Ints = np.zeros(blocks * _BLOCK, np.int64)  # 0 too where a row is full of segments
        self._held: Ints = np.zeros(blocks * _BLOCK if max_segments else 0, np.int64)
        self._largest: Ints = np.zeros(blocks, np.int64)

    def fill(self, length: int, position: int, end: int, bins: Ints) -> int:
        """Put documents into open rows, from the first on; returns the first document that none has space for."""
        blocks = np.flatnonzero(self._largest[: -(-self.opened // _BLOCK)] >= length)
        for block in blocks.tolist():
            start = block * _BLOCK
            spaces = self._spaces[start : start + _BLOCK]
            fitting = np.flatnonzero(spaces >= length)
            position = self._take(fitting + start, length, position, end, bins)
            self._largest[block] = spaces.max()
            if position == end:
                break
        return position

    def open(self, length: int, position: int, end: int, bins: Ints) -> int:
        """Put the documents that are left into new rows."""
        fits = self._capacity // length
        if self._most is not None:
            fits = min(fits, self._most)
        count = -(-(end - position) // fits)
        fresh = np.arange(self.opened, self.opened + count)
        self.opened += count
        self._spaces[fresh] = self._capacity
        position = self._take(fresh, length, position, end, bins)
        first, last = int(fresh[0]) // _BLOCK, int(fresh[-1]) // _BLOCK
        for block in range(first, last + 1):
            self._largest[block] = self._spaces[block * _BLOCK : (block + 1) * _BLOCK].max()
        return position

    def _take(self, rows: Ints, length: int, position: int, end: int, bins: Ints) -> int:
        takes = self._spaces[rows] // length
        if self._most is not None:
            takes = np.minimum(takes, self._most - self._held[rows])
        totals = np.cumsum(takes)
        used = min(len(rows), int(np.searchsorted(totals, end - position)) + 1)
        takes, rows = takes[:used], rows[:used]
        if used and totals[used - 1] > end - position:
            takes = takes.copy()
            takes[-1] -= int(totals[used - 1]) - (end - position)
        stop = position + int(takes.sum())
        bins[position:stop] = np.repeat(rows, takes)
        self._spaces[rows] -= takes * length
        if self._most is not None:
            self._held[rows] += takes
            self._spaces[rows[self._held[rows] >= self._most]] = 0
        return stop
