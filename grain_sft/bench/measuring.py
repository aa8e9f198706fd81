"""The speed of a config's batches on this machine, beside the limit, for `grain-sft report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.bench.limit import LIMIT, limit
from grain_sft.bench.throughput import Next, seconds_a_batch
from grain_sft.pipeline import Pipeline
from grain_sft.source import Element

_WARM = 3


def report_speed(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """Return the tokens a second of the limit (as in `grain-sft bench`), of one thread, and of the default threads.

    Args:
      seconds: that each is measured for, about.

    Returns:
      `rows`: name, mtok_per_s, ms_per_batch, of_limit; `tokens`, of a batch.
    """
    first = pipeline[0]
    loaders: dict[str, Next] = {
        LIMIT: limit(first),
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
