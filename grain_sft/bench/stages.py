"""The stages of a pipeline's batch as functions to be timed, and the limit beside them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from grain_sft.bench.measuring import LIMIT, Next, limit
from grain_sft.layout import FILL_ROW
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element

ROW_NUMBERS = "row numbers"
READING = "reading"
PIECES = "  of it, the pieces of rows"
WHOLE = "a whole step"

_BYTES = 1 << 27  # of ready batches, at each stage
_STEPS = 16


def sample(pipeline: Pipeline, steps: int, seconds: float) -> list[Element]:
    """Return batches of the first steps: of at most `steps`, as many as bounded memory holds and are read in `seconds`."""
    until = time.perf_counter() + seconds
    batches = [pipeline[0]]
    count = min(_STEPS, steps, _BYTES // max(1, nbytes(batches[0])))
    while len(batches) < count and time.perf_counter() < until:
        batches.append(pipeline[len(batches)])
    return batches


def stages(pipeline: Pipeline, batches: list[Element]) -> dict[str, Next]:
    """Return each stage of the steps of `batches`, in the order in which a batch is made, the limit first.

    A stage is given what the stage before made of these steps, which stays in memory for it. A whole step may take less
    time than its stages together: where ShiftTargets comes first it reads the rows itself, in fewer passes.
    """
    steps = range(len(batches))
    rows = [pipeline.sampler.rows(step) for step in steps]
    made: dict[str, Next] = {
        LIMIT: limit(batches[0]),
        ROW_NUMBERS: _in_turn(steps, pipeline.sampler.rows),
        READING: _in_turn(rows, pipeline.source.read),
        PIECES: _in_turn([each[each != FILL_ROW] for each in rows], pipeline.source.layout.pieces),
    }
    elements = [pipeline.source.read(each) for each in rows]
    for number, transform in enumerate(pipeline.transforms):
        name = type(transform).__name__
        made[name if name not in made else f"{name} ({number + 1})"] = _in_turn(elements, transform.map)
        elements = [transform.map(each) for each in elements]
    made[WHOLE] = _in_turn(steps, pipeline.__getitem__)
    return made


def nbytes(batch: Element) -> int:
    """Return the memory of a batch; an array under two keys counts once."""
    return sum({id(array): array.nbytes for array in batch.values()}.values())


def num_tokens(batch: Element) -> int:
    """Return the tokens of a batch, padding included."""
    return next(iter(batch.values())).size


def num_unpadded(batch: Element) -> int | None:
    """Return the tokens of a batch without padding; None where it has no segments."""
    segments = next((batch[key] for key in ("inputs_segmentation", "segment_ids") if key in batch), None)
    return None if segments is None else int(np.count_nonzero(segments))


def _in_turn(values: Iterable[Any], function: Callable[[Any], Any]) -> Next:
    cycle = itertools.cycle(values)
    return lambda: function(next(cycle))
