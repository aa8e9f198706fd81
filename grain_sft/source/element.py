"""Elements of sources, and the row numbers that are asked of them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, FillKey, Layout

Element = dict[str, npt.NDArray[Any]]
"""What sources give and transforms take: arrays [L] of a row or [rows, L] of a batch."""

_INT64 = np.dtype(np.int64)


def checked_rows(
    indices: Sequence[int] | npt.NDArray[np.integer], layout: Layout
) -> tuple[npt.NDArray[np.int64], bool]:
    """Return row numbers as int64 [rows], and whether one of them is `FILL_ROW`.

    Raises:
      RowIndexError: one that is not an integer, or not a row of `layout`.
    """
    rows: Any
    if type(indices) is np.ndarray and indices.dtype is _INT64 and indices.ndim == 1:
        rows, listed = indices, indices.tolist()
        if listed and min(listed) >= 0 and max(listed) < len(layout):
            return rows, False
    else:
        try:
            listed = [operator.index(row) for row in indices]
        except TypeError as error:
            raise RowIndexError(f"rows {indices!r} of {layout!r}: expected integers, one after the other.") from error
        rows = None
    lowest, highest = (min(listed), max(listed)) if listed else (0, 0)
    if lowest < FILL_ROW or highest >= len(layout):
        wrong = lowest if lowest < FILL_ROW else highest
        raise RowIndexError(f"row {wrong} of {layout!r}: expected 0 to {len(layout) - 1}.")
    return np.array(listed, np.int64) if rows is None else rows, lowest == FILL_ROW


def checked_record(index: int, layout: Layout) -> int:
    """Return the row that `source[index]` asks for: `FILL_ROW` only from a sampler, as a `FillKey`.

    Raises:
      RowIndexError: it counts from the end.
    """
    if index == FILL_ROW and not isinstance(index, FillKey):
        raise RowIndexError(
            f"row {index} of {layout!r}: expected 0 to {len(layout) - 1}. Rows don't count from the end."
        )
    return index
