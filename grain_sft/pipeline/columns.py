"""Reading only some columns of a batch: which columns of the rows to read, and how to cut the batch to the requested ones."""

from collections.abc import Sequence

from grain_sft.errors import PipelineError
from grain_sft.layout import Layout
from grain_sft.source import Element
from grain_sft.transforms import column_reach


def columns_to_read(layout: Layout, transforms: Sequence[object], start: int, stop: int) -> tuple[int, int] | None:
    """Return the first column to read for the columns [start, stop) of a batch, and the one after the last; None for all.

    A column of a batch may depend on neighbours: `ShiftTargets` takes each target from the next column. So a few more columns
    are read than requested. All are read if a transform needs whole rows.
    """
    length = layout.sequence_length
    reach = column_reach(transforms)
    if reach is None or layout.row_lengths or not 0 <= start < stop <= length:
        return None
    before, after = reach
    return max(0, start - before), min(length, stop + after)


def cut_columns(batch: Element, first: int, start: int, stop: int) -> Element:
    """Return the columns [start, stop) of a batch. `batch` has only the columns that were read, from column `first` on.

    An array of one value a row is returned whole. Columns that the batch does not have are a `PipelineError`.
    """
    width = first + min(array.shape[1] for array in batch.values() if array.ndim > 1)
    if not 0 <= start < stop <= width:
        raise PipelineError(f"columns {start} to {stop} of a batch of {width}: expected 0 <= start < stop <= {width}.")
    return {key: array[:, start - first : stop - first] if array.ndim > 1 else array for key, array in batch.items()}
