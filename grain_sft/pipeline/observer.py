"""Observers: objects that a pipeline calls for each batch, and that change no batch."""

from __future__ import annotations

import functools
import math
import os
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from grain_sft.errors import PipelineError
from grain_sft.registry import Registry
from grain_sft.source import Element
from grain_sft.storage import ForkSafeLock, activity

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline
    from grain_sft.pipeline.step_iterator import StepIterator


class Delivery(NamedTuple):
    """One batch that an iterator hands out.

    Attributes:
      pipeline, step: Pipeline and step of the batch.
      writer: Whether this process has the first row of the global batch, so that it writes for all processes.
      rows: Number of rows of the batch; 0 if a transform returned something other than a dict of arrays.
      tokens: Number of tokens of the batch, padding included.
      seconds: Time that `next` waited for the batch.
    """

    pipeline: Pipeline
    step: int
    writer: bool
    rows: int
    tokens: int
    seconds: float


class Observer:
    """Base class of observers. Every method does nothing; a subclass overrides those it needs.

    Methods are called in the thread that makes or takes the batch, so they have to be quick. An exception in one ends the run.
    A pipeline is pickled with its observers for worker processes.
    """

    def iterator_opened(self, iterator: StepIterator[Any]) -> None:
        """An iterator was made. Its `stats` are an `IteratorStats`."""

    def worker_started(self, pipeline: Pipeline) -> None:
        """This process is a worker process, and begins to make batches of `pipeline`."""

    def batch_made(self, pipeline: Pipeline, step: int, seconds: float) -> None:
        """A thread of this process made the batch of `step`, perhaps ahead of time, in `seconds`."""

    def batch_handed_out(self, delivery: Delivery) -> None:
        """The trainer gets a batch now. If an exception interrupts the return, this is called again with the same object."""

    def batch_awaited(self, iterator: StepIterator[Any], step: int, seconds: float) -> None:
        """A batch that was not ready was made, and `next` waited for it for `seconds`. It is handed out next."""

    def batch_failed(self, iterator: StepIterator[Any], step: int, seconds: float, error: BaseException) -> None:
        """The batch of `step` failed after `next` had waited for `seconds`. The next `next` tries it again."""

    def batches_counted(
        self, steps: Sequence[int], rows: Sequence[int], tokens: Sequence[int], seconds: Sequence[float]
    ) -> None:
        """Batches arrived at iterators of this process: the step, rows, tokens and wait of each, in order. Only the observers
        of the process are called, for up to `most_uncounted()` batches at once."""

    def iterator_closed(self, iterator: StepIterator[Any]) -> None:
        """An iterator was closed. This is not called for an iterator that is collected."""


OBSERVERS: Registry[Callable[..., Observer]] = Registry(
    "observer",
    PipelineError,
    {
        "audit": "grain_sft.provenance.audit:AuditLog",
        "metrics": "grain_sft.observers.metrics:of_process",
        "watchdog": "grain_sft.observers.watchdog:of_process",
    },
)


def most_uncounted() -> int:
    """Return the number of batches that may wait to be counted. It is 0 if other processes read the metrics from a folder."""
    return 0 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else 1 << 10


@functools.cache
def standing_observers() -> tuple[Observer, ...]:
    """Return the observers of this process, which are called for all its pipelines."""
    return tuple(OBSERVERS[name]() for name in ("metrics", "watchdog"))


def observers_of(pipeline: Pipeline) -> tuple[Observer, ...]:
    """Return the observers of this process and those of the pipeline."""
    return (*standing_observers(), *pipeline.observers)


def overridden(name: str, observers: Sequence[Observer]) -> list[Callable[..., None]]:
    """Return the methods `name` of the observers that override it. Calls of empty methods take a microsecond a batch."""
    return [getattr(each, name) for each in observers if getattr(type(each), name) is not getattr(Observer, name)]


@functools.cache
def _standing_made() -> list[Callable[..., None]]:
    return overridden("batch_made", standing_observers())


def make_batch(pipeline: Pipeline, step: int) -> Element:
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
