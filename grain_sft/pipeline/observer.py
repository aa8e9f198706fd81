"""The tables of observers and viewers, and the calls of observers where batches are made and counted."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from grain_sft.errors import PipelineError
from grain_sft.pipeline.run import Observer, Run
from grain_sft.registry import Registry
from grain_sft.source import Element
from grain_sft.storage import ForkSafeLock, activity

OBSERVERS: Registry[Callable[..., Observer]] = Registry(
    "observer",
    PipelineError,
    {
        "audit": "grain_sft.provenance.audit:AuditLog",
        "metrics": "grain_sft.observers.metrics:of_process",
        "watchdog": "grain_sft.observers.watchdog:of_process",
    },
    base=Observer,
)

VIEWERS: Registry[Callable[..., None]] = Registry("viewer", PipelineError, {"text": "grain_sft.view.terminal:show"})
"""Functions of a pipeline, a step, rows and a tokenizer that `Pipeline.show` calls, by name."""


def most_uncounted() -> int:
    """Return the number of batches that may wait to be counted. It is 0 if other processes read the metrics from a folder."""
    return 0 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else 1 << 10


@functools.cache
def standing_observers() -> tuple[Observer, ...]:
    """Return the observers of this process, which are called for all its pipelines."""
    return tuple(OBSERVERS[name]() for name in ("metrics", "watchdog"))


def observers_of(pipeline: Run) -> tuple[Observer, ...]:
    """Return the observers of this process and those of the pipeline."""
    return (*standing_observers(), *pipeline.observers)


def overridden(name: str, observers: Sequence[Observer]) -> list[Callable[..., None]]:
    """Return the methods `name` of the observers that override it. Calls of empty methods take a microsecond a batch."""
    return [getattr(each, name) for each in observers if getattr(type(each), name) is not getattr(Observer, name)]


@functools.cache
def _standing_made() -> list[Callable[..., None]]:
    return overridden("batch_made", standing_observers())


def make_batch(pipeline: Run, step: int) -> Element:
    """Return the batch of `step`, recorded as activity and observed."""
    thread, since = get_ident(), time.perf_counter()
    activity.doing[thread] = (activity.CHOOSING,)
    activity.making[thread] = step, since, pipeline  # as `activity.making_batch` does, which takes longer
    try:
        batch = pipeline[step]
    finally:
        activity.making.pop(thread, None)
    seconds = time.perf_counter() - since
    activity.recent.append(seconds)
    for made in _standing_made():
        made(pipeline, step, seconds)
    for observer in pipeline.observers:
        observer.batch_made(pipeline, step, seconds)
    return batch


_uncounted: list[Any] = []
"""Batches that arrived at iterators and are not counted yet. Six values each, in one flat list, which leaves the garbage
collector no objects to walk over: the iterator's stats, step, rows, tokens, and the times of the request and of the arrival."""

_counting = ForkSafeLock()
os.register_at_fork(after_in_child=_uncounted.clear)


def count_arrivals() -> None:
    """Count the batches that arrived since the last call, in the stats of their iterators and in the metrics."""
    with _counting.lock:
        values = _uncounted[:]
        del _uncounted[: len(values)]
        stats, steps, rows, tokens, requested, arrived = (values[field::6] for field in range(6))
        for each, *of_batch in zip(stats, steps, tokens, requested, arrived, strict=True):
            each.add(*of_batch)
    if values:
        seconds = [end - begin for begin, end in zip(requested, arrived, strict=True)]
        for observer in standing_observers():
            observer.batches_counted(steps, rows, tokens, seconds)


class _Count:
    """Attribute of `IteratorStats`: a count of all batches that have arrived by the time it is read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, stats: IteratorStats | None, owner: type) -> Any:
        if stats is None:
            return self
        count_arrivals()
        return getattr(stats, self._name)

    def __set__(self, stats: IteratorStats, value: float) -> None:
        setattr(stats, self._name, value)


class IteratorStats:
    """Counts of the batches that an iterator delivered.

    `next` appends to a list, and the counts are made when they are read: counting takes as long as 5 % of a batch of windows
    (`bench --only windows`), because it reads and writes many objects that are not in the processor's cache.

    Attributes:
      steps, tokens: Numbers of batches, and of their tokens, padding included.
      waited: Seconds inside `next`.
      elsewhere: Seconds that the training loop spent between a batch and the next call of `next`.
      longest: Longest wait, in seconds; the reader may set it to 0.
      waiting: Step that `next` waits for, and the time of the call on `time.perf_counter`'s clock; None between calls.
      next_step: Step after the last one that `next` waited for.
    """

    steps, tokens, next_step = _Count(), _Count(), _Count()
    waited, elsewhere, longest = _Count(), _Count(), _Count()

    def __init__(self) -> None:
        self._steps = self._tokens = self._next_step = 0
        self._waited = self._elsewhere = self._longest = self._ended = 0.0
        self._most_uncounted = 6 * most_uncounted()
        self.waiting: tuple[int, float] | None = None

    def arrived(self, step: int, batch: object, since: float) -> tuple[int, int, float]:
        """Record a batch that was requested at `since`. Return its rows, its tokens and the seconds of the wait."""
        now = time.perf_counter()
        try:
            shape = next(iter(batch.values())).shape  # type: ignore[attr-defined]
            rows, tokens = shape[0], math.prod(shape)
        except (AttributeError, TypeError, IndexError, StopIteration):  # a transform returned something else
            rows = tokens = 0
        _uncounted.extend((self, step, rows, tokens, since, now))
        if len(_uncounted) > self._most_uncounted:
            count_arrivals()
        return rows, tokens, now - since

    def add(self, step: int, tokens: int, since: float, now: float) -> None:
        """Count a batch that was requested at `since` and arrived at `now`."""
        if self._ended:
            self._elsewhere += since - self._ended
        self._steps += 1
        self._tokens += tokens
        self._next_step = step + 1
        self._waited += now - since
        self._longest = max(self._longest, now - since)
        self._ended = now
