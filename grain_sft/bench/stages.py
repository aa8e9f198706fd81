"""Stages of making a batch, as functions to time, and the limit that their speeds are compared with."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from grain_sft.bench.measuring import LIMIT, Next, limit
from grain_sft.layout import FILL_ROW, padding_share
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element

ROW_NUMBERS = "row numbers"
READING = "reading"
PIECES = "  of it, the pieces of rows"
WHOLE = "a whole step"

_BYTES = 1 << 27  # of batches that are kept for each stage
_STEPS = 16  # most batches of a sample


def sample(pipeline: Pipeline, steps: int, seconds: float) -> list[Element]:
    """Return the batches of the first steps: at most `steps` of them, read in `seconds` and limited in memory."""
    until = time.perf_counter() + seconds
    batches = [pipeline[0]]
    count = min(_STEPS, steps, _BYTES // max(1, facts(batches)["bytes"]))
    while len(batches) < count and time.perf_counter() < until:
        batches.append(pipeline[len(batches)])
    return batches


def stages(pipeline: Pipeline, batches: list[Element]) -> dict[str, Next]:
    """Return functions that run one stage for the steps of `batches` in turn, by name: the limit, then stages in order.

    Each stage gets the kept results of the stage before it. A whole step may take less time than its stages together,
    because `ShiftTargets` as the first transform reads the rows itself, in fewer passes.
    """
    steps = range(len(batches))
    rows = [pipeline.sampler.rows(step) for step in steps]
    timed: dict[str, Next] = {
        LIMIT: limit(batches[0]),
        ROW_NUMBERS: _in_turn(steps, pipeline.sampler.rows),
        READING: _in_turn(rows, pipeline.source.read),
        PIECES: _in_turn([each[each != FILL_ROW] for each in rows], pipeline.source.layout.pieces),
    }
    elements = [pipeline.source.read(each) for each in rows]
    for number, transform in enumerate(pipeline.transforms):
        name = type(transform).__name__
        timed[name if name not in timed else f"{name} ({number + 1})"] = _in_turn(elements, transform.map)
        elements = [transform.map(each) for each in elements]
    timed[WHOLE] = _in_turn(steps, pipeline.__getitem__)
    return timed


def facts(batches: Sequence[Element]) -> dict[str, Any]:
    """Return what batches hold: the rows, bytes and arrays of the first, of which one under two keys counts once; the mean
    tokens, padding included; and the share of padding, None where a batch has no segments."""
    arrays = {id(array): array for array in batches[0].values()}.values()
    sizes = [next(iter(batch.values())).size for batch in batches]
    key = next((key for key in ("inputs_segmentation", "segment_ids") if key in batches[0]), None)
    unpadded = None if key is None else sum(np.count_nonzero(batch[key]) for batch in batches)
    return {
        "rows": len(next(iter(arrays))),
        "tokens": statistics.mean(sizes),
        "padding_share": None if unpadded is None else padding_share(int(unpadded), sum(sizes)),
        "bytes": sum(array.nbytes for array in arrays),
        "arrays": len(arrays),
    }


def _in_turn(values: Iterable[Any], function: Callable[[Any], Any]) -> Next:
    cycle = itertools.cycle(values)
    return lambda: function(next(cycle))
