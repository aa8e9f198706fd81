"""First-fit decreasing: documents, longest first, each go to the first row with space enough, or open a new one."""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingOptions, equal_lengths, longest_first, rows_of

_BLOCK = 512  # rows whose largest space is kept


def first_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`."""
    order = longest_first(lengths, options)
    bins, count = assign(lengths[order], options.sequence_length, options.max_segments)
    return rows_of(order, lengths, bins, count)


def assign(
    lengths: Ints, capacity: int, max_segments: int | None = None, max_rows: int | None = None
) -> tuple[Ints, int]:
    """Return the row of each document, and the number of rows; stop after the first document that would need more than
    `max_rows`, with `max_rows + 1`.

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
    """
    rows = _Rows(len(lengths), capacity, max_segments)
    for length, first, end in equal_lengths(lengths):
        rows.place(length, first, end)
        if max_rows is not None and rows.opened > max_rows:
            return rows.bins, max_rows + 1
    return rows.bins, rows.opened


class _Rows:
    """Spaces of the rows that are open, and the largest of each block of them."""

    def __init__(self, documents: int, capacity: int, max_segments: int | None) -> None:
        shape = -(-documents // _BLOCK), _BLOCK
        self.bins: Ints = np.empty(documents, np.int64)
        self.opened = 0
        self._capacity, self._most = capacity, max_segments
        self._blocks: Ints = np.zeros(shape, np.int64)  # spaces; 0 too where a row is full of segments
        self._spaces = self._blocks.reshape(-1)
        self._segments: Ints = np.zeros(len(self._spaces) if max_segments else 0, np.int64)
        self._largest: Ints = np.zeros(shape[0], np.int64)

    def place(self, length: int, first: int, end: int) -> None:
        """Place documents `first` to `end`, all of `length`: in open rows from the first on, then in new ones."""
        for block in np.flatnonzero(self._largest[: -(-self.opened // _BLOCK)] >= length).tolist():
            spaces = self._blocks[block]
            first = self._fill(np.flatnonzero(spaces >= length) + block * _BLOCK, length, first, end)
            self._largest[block] = spaces.max()
            if first == end:
                return
        opened, fits = self.opened, min(self._capacity // length, self._most or end)
        self.opened += -(-(end - first) // fits)
        self._spaces[opened : self.opened] = self._capacity
        self._fill(np.arange(opened, self.opened), length, first, end)
        changed = slice(opened // _BLOCK, -(-self.opened // _BLOCK))
        self._largest[changed] = self._blocks[changed].max(axis=1)

    def _fill(self, rows: Ints, length: int, first: int, end: int) -> int:
        """Place documents in `rows` in turn, and return the first document that is left."""
        takes = self._spaces[rows] // length
        if self._most is not None:
            takes = np.minimum(takes, self._most - self._segments[rows])
        totals = np.cumsum(takes)
        used = min(len(rows), int(np.searchsorted(totals, end - first)) + 1)
        takes, rows = takes[:used], rows[:used]
        takes[-1] -= max(0, int(totals[used - 1]) - (end - first))
        stop = first + int(takes.sum())
        self.bins[first:stop] = np.repeat(rows, takes)
        self._spaces[rows] -= takes * length
        if self._most is not None:
            self._segments[rows] += takes
            self._spaces[rows[self._segments[rows] >= self._most]] = 0
        return stop
