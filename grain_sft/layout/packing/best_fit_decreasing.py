"""Best-fit decreasing, as OLMo-core's `InstancePacker` does it (src/olmo_core/data/utils.py; arXiv:2404.10830).

Each document, longest first, goes to the row with the smallest sufficient space, or to a new row if none has enough. Among
rows of equal space, it goes to the row that reached that space first.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from grain_sft.layout.packing.algorithm import Ints, PackedRows, PackingOptions, equal_lengths, longest_first, rows_of

_MANY = 10  # mean number of documents per length from which on `_place_together` is faster


def best_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Return the rows of documents of `lengths`, int64 [documents]."""
    order = longest_first(lengths, options)
    return rows_of(order, lengths, assign(lengths[order], options.sequence_length, options.max_segments))


def assign(lengths: Ints, capacity: int, max_segments: int | None = None, spaces: Ints | None = None) -> Ints:
    """Return the row of each document, int64 [documents].

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
      capacity: Number of tokens in a row.
      max_segments: Maximum number of these documents in a row; None for no limit.
      spaces: int64 [rows], number of free tokens in each row that is already open. New rows are numbered after these. None
        means no open rows.
    """
    if spaces is None:
        capacity = min(capacity, int(lengths.sum()))  # a smaller capacity holds all in one row: the rows do not change
    few = len(lengths) < _MANY * (1 + np.count_nonzero(np.diff(lengths)))
    open_spaces = np.zeros(0, np.int64) if spaces is None else spaces
    if few or max_segments is not None:
        return _place_by_row(lengths, capacity, max_segments or len(lengths), open_spaces)
    return _place_together(lengths, capacity, open_spaces)


def _place_by_row(lengths: Ints, capacity: int, most: int, open_spaces: Ints) -> Ints:
    """Assign documents row by row: each iteration places the next documents of one length that go to the same row.

    Rows of equal space form a queue that is linked through the rows, which is 1.3 times as fast as a deque for each space.
    `words` has a bit for each space that some row has, 64 spaces to a word; `used` has a bit for each word that is not 0.
    """
    first, last = dict[int, int](), dict[int, int]()  # row, of each space
    after = [-1] * len(open_spaces)  # of each row, the next of the same space
    documents = [0] * len(open_spaces)  # of each row
    words: dict[int, int] = {}
    for space, group in _by_space(open_spaces):
        first[space], last[space] = int(group[0]), int(group[-1])
        for row, following in itertools.pairwise(group.tolist()):
            after[row] = following
        words[space >> 6] = words.get(space >> 6, 0) | 1 << (space & 63)
    used = sum(1 << at for at in words)
    rows, counts = [], []
    for length, count in equal_lengths(lengths):
        while count:
            space, at = 0, length >> 6
            if word := words.get(at, 0) >> (length & 63):
                space = length + (word & -word).bit_length() - 1
            elif above := used >> (at + 1):
                at += (above & -above).bit_length()
                word = words[at]
                space = (at << 6) + (word & -word).bit_length() - 1
            if space:
                row = first[space]
                if (following := after[row]) >= 0:
                    first[space], after[row] = following, -1
                else:
                    del first[space]
                    at = space >> 6
                    words[at] ^= 1 << (space & 63)
                    used ^= 0 if words[at] else 1 << at
            else:
                space, row = capacity, len(documents)
                after.append(-1)
                documents.append(0)
            # The row stays the one with the smallest sufficient space as long as another document fits.
            taken = 1 if count == 1 or space < 2 * length else min(count, space // length, most - documents[row])
            rows.append(row)
            counts.append(taken)
            count -= taken
            documents[row] += taken
            space -= taken * length
            if not space or documents[row] == most:
                continue
            if space in first:
                after[last[space]] = row
            else:
                first[space] = row
                at = space >> 6
                words[at] = words.get(at, 0) | 1 << (space & 63)
                used |= 1 << at
            last[space] = row
    return np.repeat(np.array(rows, np.int64), counts)


def _by_space(spaces: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield each space above 0 that some rows have, and the numbers of these rows, ascending."""
    order = np.argsort(spaces, kind="stable")
    firsts = np.flatnonzero(np.diff(spaces[order], prepend=0))  # of each group but that of full rows
    for group in np.split(order, firsts)[1:]:
        yield int(spaces[group[0]]), group


def _place_together(lengths: Ints, capacity: int, open_spaces: Ints) -> Ints:
    """Assign documents together: each iteration places all documents of one length that go to rows of the same space."""
    rows_of_documents: Ints = np.empty(len(lengths), np.int64)
    queues = {space: [group] for space, group in _by_space(open_spaces)}
    spaces = sum(1 << space for space in queues)  # bit s: some row has space s
    opened, first = len(open_spaces), 0
    for length, number in equal_lengths(lengths):
        end = first + number
        while first < end:
            if fitting := spaces >> length:
                space = length + (fitting & -fitting).bit_length() - 1
                spaces ^= 1 << space
                queue = queues.pop(space)
                rows = queue[0] if len(queue) == 1 else np.concatenate(queue)
            else:
                space = capacity
                rows = np.arange(opened, opened - (first - end) // (space // length))
            each = min(space // length, end - first)  # documents of each row, as in `_place_by_row`
            count = min(len(rows), (end - first) // each)
            taken, left = rows[:count], space - each * length
            rows_of_documents[first : first + count * each] = taken if each == 1 else np.repeat(taken, each)
            first += count * each
            if left in queues:
                queues[left].append(taken)
            elif left:
                queues[left] = [taken]
                spaces |= 1 << left
            if not fitting:
                opened += count
            elif count < len(rows):
                queues[space] = [rows[count:]]
                spaces |= 1 << space
    return rows_of_documents
