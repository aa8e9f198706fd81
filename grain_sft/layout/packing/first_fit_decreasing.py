"""First-fit decreasing: each document, longest first, goes to the first row with enough space, or to a new row."""

import numpy as np

from grain_sft.layout.packing.algorithm import PackedRows, PackingOptions, equal_lengths, longest_first, rows_of
from grain_sft.types import Ints


def first_fit_decreasing(lengths: Ints, options: PackingOptions) -> PackedRows:
    """Return the rows of documents of `lengths`, int64 [documents]."""
    order = longest_first(lengths, options)
    bins = assign(lengths[order], options.sequence_length, options.max_segments or len(lengths), len(lengths))
    return rows_of(order, lengths, bins)


def assign(lengths: Ints, capacity: int, most: int, max_rows: int) -> Ints:
    """Return the row of each document, int64 [n]. Stop before the first document that fits into none of the rows.

    A binary tree finds the first row with enough space. Row r is the leaf `leaves + r`, and the children of node n are 2n and
    2n + 1. Each node has the largest space of the rows below it.

    Args:
      lengths: int64 [documents], longest first, each from 1 to `capacity`.
      capacity: Number of tokens in a row.
      most: Maximum number of documents in a row.
      max_rows: Maximum number of rows.
    """
    leaves = 1 << (max_rows - 1).bit_length()  # a power of two; leaves after the last row also have space
    largest = [capacity] * (2 * leaves)
    documents = [0] * leaves  # number of documents in each row
    rows: list[int] = []
    counts: list[int] = []
    for length, count in equal_lengths(lengths):
        while count:
            node = 1
            while node < leaves:
                node *= 2
                if largest[node] < length:
                    node += 1  # the right child
            row, space = node - leaves, largest[node]
            if row >= max_rows or space < length:
                return np.repeat(np.array(rows, np.int64), counts)
            # take all documents of this length that the row can hold; a row with `most` documents gets the space 0
            taken = 1 if count == 1 else min(count, space // length, most - documents[row])
            rows.append(row)
            counts.append(taken)
            count -= taken
            documents[row] += taken
            space = space - taken * length if documents[row] < most else 0
            largest[node] = space
            while node > 1:  # update the nodes above the row
                other = largest[node ^ 1]  # the other child of the same parent
                space = other if other > space else space
                node >>= 1
                if largest[node] == space:
                    break
                largest[node] = space
    return np.repeat(np.array(rows, np.int64), counts)
