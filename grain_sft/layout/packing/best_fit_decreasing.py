"""Best-fit decreasing, as OLMo-core's `InstancePacker` does it (src/olmo_core/data/utils.py; arXiv:2404.10830).

Documents, longest first, each go to the row with the smallest space that suffices; among rows of equal space to the one
that reached that space first; else a new row is opened. Where many documents have the same length, those that go to rows of
one space go there together, so that the work is per length and space, not per document.
"""

from __future__ import annotations

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingOptions, equal_lengths, longest_first, rows_of

_MANY = 10  # documents of a length, on average, from which on they are faster placed together
_LONGEST = 1 << 22  # tokens of a row, for which lists of as many spaces are made
_SPACES = 64  # of a list, for each document, at most


def best_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Pack documents of `lengths`."""
    order = longest_first(lengths, options)
    bins, count = assign(lengths[order], options.sequence_length, options.max_segments)
    return rows_of(order, lengths, bins, count)


def assign(lengths: Ints, capacity: int, max_segments: int | None = None) -> tuple[Ints, int]:
    """The row of each document, and the number of rows.

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
    """
    capacity = min(capacity, int(lengths.sum()))  # if that is less, all fits into one row, and spaces differ as before
    few = len(lengths) < _MANY * (1 + np.count_nonzero(np.diff(lengths)))
    if few and capacity <= min(_LONGEST, _SPACES * len(lengths)):
        return _one_by_one(lengths, capacity, max_segments)
    packer = _Packer(len(lengths), capacity, max_segments)
    for length, first, end in equal_lengths(lengths):
        packer.place(length, first, end)
    return packer.bins, packer.opened


def _one_by_one(lengths: Ints, capacity: int, max_segments: int | None) -> tuple[Ints, int]:
    """`assign` by a plain loop. Rows of equal space stand in a list that is linked through the rows, so that a row is taken
    and put away in a step; which spaces some row has is kept in words of 64 bits, and which words have a bit, in one number."""
    most = len(lengths) if max_segments is None else max_segments
    first, last = [-1] * (capacity + 1), [-1] * (capacity + 1)  # rows, of each space
    after: list[int] = []  # of each row, the next of the same space
    held: list[int] = []  # documents of each row
    words, used = [0] * ((capacity >> 6) + 1), 0
    bins: list[int] = []
    for length in lengths.tolist():
        space, at = 0, length >> 6
        word = words[at] >> (length & 63)
        if word:
            space = length + (word & -word).bit_length() - 1
        elif above := used >> (at + 1):
            at += (above & -above).bit_length()
            word = words[at]
            space = (at << 6) + (word & -word).bit_length() - 1
        if space:
            row = first[space]
            first[space] = after[row]
            if after[row] < 0:
                at = space >> 6
                words[at] ^= 1 << (space & 63)
                if not words[at]:
                    used ^= 1 << at
        else:
            space, row = capacity, len(held)
            after.append(-1)
            held.append(0)
        bins.append(row)
        held[row] += 1
        space -= length
        if space and held[row] < most:
            after[row] = -1
            if first[space] < 0:
                first[space] = row
                at = space >> 6
                words[at] |= 1 << (space & 63)
                used |= 1 << at
            else:
                after[last[space]] = row
            last[space] = row
    return np.array(bins, np.int64), len(held)


class _Packer:
    """Rows by the space that they have left, in the order in which they reached it."""

    def __init__(self, documents: int, capacity: int, max_segments: int | None) -> None:
        self.bins: Ints = np.empty(documents, np.int64)
        self.opened = 0
        self._capacity = capacity
        self._most = max_segments
        self._held: Ints = np.zeros(documents if max_segments else 0, np.int64)  # documents a row
        self._queues: dict[int, list[Ints]] = {}
        self._spaces = 0  # bit s: some row has space s

    def place(self, length: int, first: int, end: int) -> None:
        """Place documents `first` to `end`, all of `length`."""
        while first < end:
            fitting = self._spaces >> length
            if fitting:
                space = length + (fitting & -fitting).bit_length() - 1
                candidates = self._pop(space)
            else:
                space = self._capacity
                fits = max(1, min(space // length, self._most or space))
                candidates = np.arange(self.opened, self.opened - (first - end) // fits, dtype=np.int64)
            used, first = self._fill(candidates, space, length, first, end)
            if fitting:
                if used < len(candidates):
                    self._push(space, candidates[used:])
            else:
                self.opened += used

    def _fill(self, candidates: Ints, space: int, length: int, first: int, end: int) -> tuple[int, int]:
        """Give each candidate as many documents as it takes; returns how many candidates got some, and the first
        document that is left. A row with space left for another goes on taking: no other has less that suffices."""
        fits = space // length
        if self._most is not None:
            return self._fill_bounded(candidates, space, length, first, end)
        full = min(len(candidates), (end - first) // fits)
        if full:
            taken = candidates[:full]
            self.bins[first : first + full * fits] = taken if fits == 1 else np.repeat(taken, fits)
            self._push(space - fits * length, taken)
            return full, first + full * fits
        self.bins[first:end] = candidates[0]
        self._push(space - (end - first) * length, candidates[:1])
        return 1, end

    def _fill_bounded(self, candidates: Ints, space: int, length: int, first: int, end: int) -> tuple[int, int]:
        """The same with a bound on the documents a row: each candidate may take another number."""
        assert self._most is not None
        takes = np.minimum(space // length, self._most - self._held[candidates])
        totals = np.cumsum(takes)
        used = min(len(candidates), int(np.searchsorted(totals, end - first)) + 1)
        takes = takes[:used]
        takes[-1] -= max(0, int(totals[used - 1]) - (end - first))
        taken = candidates[:used]
        stop = first + int(takes.sum())
        self.bins[first:stop] = np.repeat(taken, takes)
        self._held[taken] += takes
        left = space - takes * length
        still = self._held[taken] < self._most
        for rest in dict.fromkeys(left[still].tolist()):
            self._push(rest, taken[still & (left == rest)])
        return used, stop

    def _pop(self, space: int) -> Ints:
        queue = self._queues.pop(space)
        self._spaces ^= 1 << space
        return queue[0] if len(queue) == 1 else np.concatenate(queue)

    def _push(self, space: int, rows: Ints) -> None:
        if not space:
            return
        queue = self._queues.get(space)
        if queue is None:
            self._queues[space] = [rows]
            self._spaces |= 1 << space
        else:
            queue.append(rows)
