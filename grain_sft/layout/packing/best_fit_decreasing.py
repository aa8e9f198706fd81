"""Best-fit decreasing, as OLMo-core's `InstancePacker` does it (src/olmo_core/data/utils.py; arXiv:2404.10830).

Each document, longest first, goes to the row with the smallest sufficient space, or to a new row if none has enough. Among
rows of equal space, it goes to the row that reached that space first.
"""

from bisect import bisect_left, insort
from collections import deque

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingOptions, equal_lengths, longest_first, rows_of
from grain_sft.types import Ints


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
    most = max_segments or len(lengths)
    # For each space above 0, the groups of rows that have it, as pairs: rows that reached it together with an equal number of
    # documents, and this number. The first group is the one that reached it first.
    queues: dict[int, deque[tuple[Ints, int]]] = {}
    opened = 0
    if spaces is not None:
        opened, order = len(spaces), np.argsort(spaces, kind="stable")
        firsts = np.flatnonzero(np.diff(spaces[order], prepend=0))  # where a greater space begins in `order`
        open_rows = np.split(order, firsts)[1:]  # without the first group, the full rows
        queues = {int(spaces[rows[0]]): deque([(rows, 0)]) for rows in open_rows}
    ascending = sorted(queues)
    rows_of_documents: Ints = np.empty(len(lengths), np.int64)
    first = 0
    for length, number in equal_lengths(lengths):
        end = first + number
        while first < end:  # each iteration places the documents of this length that go to one group, or to new rows
            at = bisect_left(ascending, length)
            space = ascending[at] if at < len(ascending) else capacity
            rows, documents = queues[space].popleft() if at < len(ascending) else (None, 0)
            # A row with the smallest sufficient space has less space afterwards, so it also gets the next documents.
            per_row = min(space // length, end - first, most - documents)
            count = (end - first) // per_row  # rows that get `per_row` documents
            if rows is None:
                rows = np.arange(opened, opened + count)
                opened += count
            elif count < len(rows):
                queues[space].appendleft((rows[count:], documents))
                rows = rows[:count]
            elif not queues[space]:
                del queues[space], ascending[at]
            placed = first + len(rows) * per_row
            rows_of_documents[first:placed] = rows if per_row == 1 else rows.repeat(per_row)
            first = placed
            space -= per_row * length
            if space and documents + per_row < most:
                if space not in queues:
                    insort(ascending, space)
                    queues[space] = deque()
                queues[space].append((rows, documents + per_row))
    return rows_of_documents
