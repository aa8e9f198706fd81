"""Reads of only some columns of a batch. A column is the place of a token in its row."""

from collections.abc import Sequence

import numpy as np

from grain_sft.errors import PipelineError
from grain_sft.layout import Layout
from grain_sft.source import Element
from grain_sft.transforms import column_reach


def columns_to_read(layout: Layout, transforms: Sequence[object], start: int, stop: int) -> tuple[int, int] | None:
    """Return the range of columns to read for the columns [start, stop) of a batch; None for all columns.

    A column may depend on its neighbours: `ShiftTargets` takes targets from the next column, so (0, 8) needs (0, 9).
    """
    length = layout.sequence_length
    reach = column_reach(transforms)
    # All columns are read in three cases: a column may depend on any other (`reach` is None), rows differ in length, or the
    # range is outside of the row. In the last case, `cut_columns` then states the width of the batch in its error.
    if reach is None or layout.row_lengths or not 0 <= start < stop <= length:
        return None
    before, after = reach
    return max(0, start - before), min(length, stop + after)


def cut_columns(batch: Element, first: int, start: int, stop: int) -> Element:
    """Return the columns [start, stop) of `batch`, which begins at column `first`. Arrays [rows] and scalars are not cut."""
    # A transform may have dropped columns, so the width is that of the arrays, not of the layout.
    width = first + min((np.shape(array)[1] for array in batch.values() if np.ndim(array) > 1), default=stop - first)
    if not 0 <= start < stop <= width:
        raise PipelineError(f"columns {start} to {stop} of a batch of {width}: expected 0 <= start < stop <= {width}.")
    cut = slice(start - first, stop - first)
    return {key: array[:, cut] if np.ndim(array) > 1 else array for key, array in batch.items()}
