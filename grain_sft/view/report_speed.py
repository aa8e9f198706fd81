"""What a report says of speed: the config's batches on this machine, beside the limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.bench.throughput import Next, seconds_a_batch
from grain_sft.pipeline import Pipeline
from grain_sft.sources import Element

LIMIT = "limit: ready batches copied in memory"
_BYTES = 1 << 28  # of the batches that the limit copies
_WARM = 3


def throughput(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """Tokens a second, each measured for about `seconds`: of the limit, which copies ready batches from memory to fresh
    arrays, of one thread, and of the default of prefetching threads.

    Returns:
      `rows`: name, mtok_per_s, ms_per_batch, of_limit; `tokens`, of a batch.
    """
    first = pipeline[0]
    size = sum(array.nbytes for array in first.values())
    count = max(1, min(16, pipeline.end_step, _BYTES // size))
    ready = [pipeline[step] for step in range(count)]
    copied = itertools.cycle(ready)
    loaders: dict[str, Next] = {
        LIMIT: lambda: {name: array.copy() for name, array in next(copied).items()},
        "one thread": _endless(lambda: pipeline.iter(threads=0)).__next__,
        "default (prefetching threads)": _endless(pipeline.iter).__next__,
    }
    times: dict[str, float] = {}
    for name, next_batch in loaders.items():
        for _ in range(_WARM):
            next_batch()
        times[name] = seconds_a_batch(next_batch, seconds)
    tokens = next(iter(first.values())).size
    rows = [
        {
            "name": name,
            "mtok_per_s": tokens / taken / 1e6,
            "ms_per_batch": taken * 1e3,
            "of_limit": times[LIMIT] / taken,
        }
        for name, taken in times.items()
    ]
    return {"tokens": tokens, "seconds": seconds, "rows": rows}


def _endless(make: Callable[[], Any]) -> Iterator[Element]:
    """Batches of a run, again from the first where it ends."""
    while True:
        batches = make()
        try:
            yield from batches
        finally:
            batches.close()
