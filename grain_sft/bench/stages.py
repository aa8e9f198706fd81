"""Stages of a step, as functions to measure."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from grain_sft.bench.measuring import LIMIT, Next, limit
from grain_sft.layout import FILL_ROW
from grain_sft.pipeline import Pipeline, batch_of_arrays
from grain_sft.source import Element

ROW_NUMBERS = "row numbers"
READING = "reading"
PIECES = "  of it, the pieces of rows"  # `layout.pieces`, a part of READING
WHOLE = "a whole step"

# keys of the tokens of a batch: of `ShiftTargets`, of the source, or of preference pairs
_TOKENS = ("inputs", "tokens", "prompt_ids", "chosen_ids", "rejected_ids")
_SAMPLE_BYTES = 1 << 27  # maximum size of a sample
_SAMPLE_BATCHES = 16  # maximum number of batches of a sample


def sample(pipeline: Pipeline, steps: int, seconds: float) -> list[Element]:
    """Return the batches of the first `steps` steps, or of fewer if they take `seconds` or reach the limits of a sample."""
    until = time.perf_counter() + seconds
    batches = [batch_of_arrays(pipeline, 0)]  # raises PipelineError if the batch is not a dict of arrays
    count = min(_SAMPLE_BATCHES, steps, _SAMPLE_BYTES // max(1, facts(batches)["bytes"]))
    while len(batches) < count and time.perf_counter() < until:
        batches.append(pipeline[len(batches)])
    return batches


def stages(pipeline: Pipeline, batches: list[Element]) -> dict[str, Next]:
    """Return the functions to measure, by name: `LIMIT` copies a batch, the next ones are the stages, and `WHOLE` is the step.

    Each call runs the stage for the next step, on inputs that were computed beforehand. A whole step may be faster than its
    stages together, because it may apply `NgramFilter` and `ShiftTargets` while it reads rows.
    """
    steps = range(len(batches))
    rows = [pipeline.sampler.rows(step) for step in steps]

    def read(step: int) -> Element:
        return pipeline.source_at(step).read(rows[step])

    timed: dict[str, Next] = {
        LIMIT: limit(batches[0]),
        ROW_NUMBERS: _in_turn(steps, pipeline.sampler.rows),
        READING: _in_turn(steps, read),
        PIECES: _in_turn([numbers[numbers != FILL_ROW] for numbers in rows], pipeline.source.layout.pieces),
    }
    elements = [read(step) for step in steps]
    for number, transform in enumerate(pipeline.transforms):
        name = type(transform).__name__
        timed[name if name not in timed else f"{name} ({number + 1})"] = _in_turn(elements, transform.map)
        elements = [transform.map(element) for element in elements]
    timed[WHOLE] = _in_turn(steps, pipeline.__getitem__)
    return timed


def facts(batches: Sequence[Element]) -> dict[str, Any]:
    """Return facts about batches with the same keys. `tokens` and `padding_share` are means. The others are of the first batch.

    An array under two keys counts once. Scalars don't count. Without segments, `padding_share` is None.
    """
    arrays = {id(array): array for array in batches[0].values() if np.ndim(array)}.values()
    keys = [key for key in _TOKENS if key in batches[0]] or [*batches[0]][:1]
    sizes = [sum(np.size(batch[key]) for key in keys) for batch in batches]
    key = next((key for key in ("inputs_segmentation", "segment_ids") if key in batches[0]), None)
    unpadded = None if key is None else sum(np.count_nonzero(batch[key]) for batch in batches)
    return {
        "rows": len(next(iter(arrays), ())),
        "tokens": statistics.mean(sizes),
        "padding_share": None if unpadded is None else 1 - int(unpadded) / sum(sizes),
        "bytes": sum(array.nbytes for array in arrays),
        "arrays": len(arrays),
    }


def _in_turn(values: Iterable[Any], function: Callable[[Any], Any]) -> Next:
    """Return a function that calls `function` with the next of `values`, endlessly."""
    cycle = itertools.cycle(values)
    return lambda: function(next(cycle))
