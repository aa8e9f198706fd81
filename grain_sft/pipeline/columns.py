"""`Pipeline.read` of some columns of a batch, which does not read the other columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PipelineError
from grain_sft.source import Element
from grain_sft.transforms import column_reach

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline

Parts = dict[tuple[int, int], "Pipeline"]
"""Pipelines that read a range of columns alone, by the first column and the one after the last."""


def read_columns(
    pipeline: Pipeline, parts: Parts, step: int, slots: npt.NDArray[np.int64], columns: tuple[int, int]
) -> Element:
    """Return `columns` (start, stop) of the rows at `slots` in the batch of `step`, as `Pipeline.read` does.

    A column of a batch may depend on neighbours: `ShiftTargets` takes each target from the next column. So a few more columns
    are read, and cut off after the transforms. If a transform needs whole rows, whole rows are read. An array of one value a
    row is returned whole. `parts` caches pipelines.
    """
    start, stop = columns
    first, part = _part(pipeline, parts, start, stop)
    batch = part.read(step, slots)
    width = min(array.shape[1] for array in batch.values() if array.ndim > 1) + first
    if not 0 <= start < stop <= width:
        raise PipelineError(f"columns {start} to {stop} of a batch of {width}: expected 0 <= start < stop <= {width}.")
    return {key: array[:, start - first : stop - first] if array.ndim > 1 else array for key, array in batch.items()}


def _part(pipeline: Pipeline, parts: Parts, start: int, stop: int) -> tuple[int, Pipeline]:
    """Return the first column to read, and the pipeline to read it with. Its batches begin with that column."""
    layout = pipeline.source.layout
    length = layout.sequence_length
    reach = column_reach(pipeline.transforms)
    if reach is None or layout.row_lengths or not 0 <= start < stop <= length:
        return 0, pipeline
    first, last = max(0, start - reach[0]), min(length, stop + reach[1])
    part = parts.get((first, last))
    if part is None:
        source, sampler = pipeline.source.columns(first, last), pipeline.planned_sampler
        part = type(pipeline)(source, sampler, pipeline.transforms, amendments=pipeline.amendments)
        parts[first, last] = part
    return first, part
