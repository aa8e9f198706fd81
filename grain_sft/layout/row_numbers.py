"""Checks of the row numbers that callers give to a source, and `FILL_ROW`, the number of a row of padding."""

import operator
from collections.abc import Sequence, Sized

import numpy as np

from grain_sft.errors import RowIndexError
from grain_sft.types import Integers, Ints

_INT64 = np.dtype(np.int64)

FILL_ROW = -1
"""Row number of a row that holds only padding. Such rows fill the last batch of an evaluation."""


class FillKey(int):
    """`FILL_ROW` as a record key. Grain reads record `key % num_rows`, and -1 would become the last row. So `%` returns -1."""

    def __mod__(self, other: int) -> int:
        return self


def checked_rows(indices: Sequence[int] | Integers, layout: Sized) -> tuple[Ints, bool]:
    """Return row numbers as int64 [rows], and whether any of them is `FILL_ROW`.

    Raises:
      RowIndexError: An index is not an integer, or is neither a row of `layout` nor `FILL_ROW`.
    """
    try:
        of_int64 = type(indices) is np.ndarray and indices.dtype is _INT64 and indices.ndim == 1
        listed = indices.tolist() if of_int64 else [operator.index(row) for row in indices]  # type: ignore[union-attr]
    except TypeError as error:
        raise RowIndexError(f"rows {indices!r} of {layout!r}: expected a sequence of integers.") from error
    lowest, highest = (min(listed), max(listed)) if listed else (0, -1)
    if lowest < FILL_ROW or highest >= len(layout):
        wrong = lowest if lowest < FILL_ROW else highest
        raise RowIndexError(f"row {wrong} of {layout!r}: expected 0 to {len(layout) - 1}.")
    return indices if of_int64 else np.array(listed, np.int64), lowest == FILL_ROW  # type: ignore[return-value]


def checked_record(index: int, layout: Sized) -> int:
    """Return `index`, the key of a record, unless it is a plain -1. Samplers give a row of padding the key `FillKey(-1)`.

    Raises:
      RowIndexError: `index` is -1, but not a `FillKey`. The caller may mean the last row.
    """
    # an array has no single truth value; `checked_rows` refuses it later
    if not isinstance(index, FillKey | np.ndarray) and index == FILL_ROW:
        raise RowIndexError(f"row {index} of {layout!r}: expected 0 to {len(layout) - 1}. Don't count from the end.")
    return index
