"""Observers: objects that a pipeline calls for each batch, and that change no batch."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

from grain_sft.errors import PipelineError
from grain_sft.registry import Registry
from grain_sft.source import Element
from grain_sft.storage import activity

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


class IteratorStats:
    """Counts of the batches that an iterator delivered.

    Attributes:
      steps, tokens: Numbers of batches, and of their tokens, padding included.
      waited: Seconds inside `next`.
      elsewhere: Seconds that the training loop spent between a batch and the next call of `next`.
      longest: Longest wait, in seconds; the reader may set it to 0.
      waiting: Step that `next` waits for, and the time of the call on `time.perf_counter`'s clock; None between calls.
      next_step: Step after the last one that `next` waited for.
    """

    __slots__ = ("_ended", "elsewhere", "longest", "next_step", "steps", "tokens", "waited", "waiting")

    def __init__(self) -> None:
        self.steps = self.tokens = self.next_step = 0
        self.waited = self.elsewhere = self.longest = self._ended = 0.0
        self.waiting: tuple[int, float] | None = None

    def arrived(self, step: int, batch: object, since: float) -> tuple[int, int, float]:
        """Count a batch that was requested at `since`. Return its rows, its tokens and the seconds of the wait."""
        now = time.perf_counter()
        try:
            shape = next(iter(batch.values())).shape  # type: ignore[attr-defined]
            rows, tokens = shape[0], math.prod(shape)
        except (AttributeError, TypeError, IndexError, StopIteration):  # a transform returned something else
            rows = tokens = 0
        seconds = now - since
        if self._ended:
            self.elsewhere += since - self._ended
        self.steps, self.tokens, self.next_step = self.steps + 1, self.tokens + tokens, step + 1
        self.waited, self._ended = self.waited + seconds, now
        if seconds > self.longest:
            self.longest = seconds
        return rows, tokens, seconds
