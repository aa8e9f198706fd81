"""What a pipeline's batch is made of, stage by stage, as functions to be timed; and the limit beside them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.bench.limit import LIMIT, limit
from grain_sft.bench.throughput import Next
from grain_sft.layout import FILL_ROW
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element, MixtureSource, ReadRows
from grain_sft.transforms import ShiftTargets

Rows = npt.NDArray[np.int64]

ROW_NUMBERS = "row numbers"
READING = "reading"
PIECES = "  of it, where rows lie"
WHOLE = "a whole step"

_BYTES = 1 << 27  # of ready batches, at each stage
_STEPS = 16


def sample(pipeline: Pipeline, steps: int, seconds: float) -> list[Element]:
    """Batches of the first steps: of at most `steps`, as many as bounded memory holds and as are read in some `seconds`."""
    until = time.perf_counter() + seconds
    batches = [pipeline[0]]
    count = min(_STEPS, steps, _BYTES // max(1, nbytes(batches[0])))
    while len(batches) < count and time.perf_counter() < until:
        batches.append(pipeline[len(batches)])
    return batches


def stages(pipeline: Pipeline, batches: list[Element]) -> dict[str, Next]:
    """Each stage of the steps that `batches` are of, in the order in which a batch is made, the limit first.

    A stage is given what the stage before made of these steps, which stays in memory for it.
    """
    steps = range(len(batches))
    rows = [pipeline.sampler.rows(step) for step in steps]
    made: dict[str, Next] = {
        LIMIT: limit(batches[0]),
        ROW_NUMBERS: _in_turn(steps, pipeline.sampler.rows),
        READING: _in_turn(rows, lambda each: _read(pipeline, each)),
    }
    pieces = _pieces(pipeline)
    if pieces is not None:
        made[PIECES] = _in_turn([each[each != FILL_ROW] for each in rows], pieces)
    given: list[Any] = [_read(pipeline, each) for each in rows]
    for number, transform in enumerate(pipeline.transforms):
        name = type(transform).__name__
        name = name if name not in made else f"{name} ({number + 1})"
        made[name] = _in_turn(given, _applied(transform))
        given = [_applied(transform)(each) for each in given]
    made[WHOLE] = _in_turn(steps, pipeline.__getitem__)
    return made


def nbytes(batch: Element) -> int:
    """Of a batch in memory; an array that stands under two keys counts once."""
    return sum({id(array): array.nbytes for array in batch.values()}.values())


def tokens(batch: Element) -> int:
    """Of a batch, padding included."""
    return next(iter(batch.values())).size


def held(batch: Element) -> int | None:
    """Tokens of a batch that are no padding; None where it does not say."""
    segments = next((batch[key] for key in ("inputs_segmentation", "segment_ids") if key in batch), None)
    return None if segments is None else int(np.count_nonzero(segments))


def _in_turn(values: Any, function: Callable[[Any], Any]) -> Next:
    cycle = itertools.cycle(values)
    return lambda: function(next(cycle))


def _read(pipeline: Pipeline, rows: Rows) -> Element | ReadRows:
    """What a pipeline reads of `rows`: less, where its first transform can do with that."""
    source = pipeline.source
    if pipeline.transforms and type(pipeline.transforms[0]) is ShiftTargets and not isinstance(source, MixtureSource):
        read = source.read_rows(rows)
        if read is not None:
            return read
    return source.read(rows)


class _Ready:
    """A source whose rows were read already."""

    def __init__(self, read: ReadRows) -> None:
        self._read = read

    def read_shifted(self, rows: object) -> None:
        return None

    def read_rows(self, rows: object) -> ReadRows:
        return self._read


def _applied(transform: Any) -> Callable[[Any], Any]:
    """The transform of what `_read` gave, or of what the transform before it gave."""
    return lambda given: transform.read(_Ready(given), ()) if isinstance(given, ReadRows) else transform.map(given)


def _pieces(pipeline: Pipeline) -> Callable[[Rows], Any] | None:
    """How the source finds what rows are made of; None where it does not ask the layout."""
    source = pipeline.source
    if isinstance(source, MixtureSource) or source.layout.row_format is not None:
        return None
    if source._long is not None:  # then it goes by one row after the other
        runs = source._long.layout.runs
        return lambda rows: list(map(runs, rows.tolist()))
    return source.layout.pieces
