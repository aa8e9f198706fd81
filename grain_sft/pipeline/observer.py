"""Observer: base of the objects that are called for each batch; with the tables of observers and viewers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from grain_sft.errors import PipelineError
from grain_sft.registry import Registry

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline
    from grain_sft.pipeline.step_iterator import StepIterator

Arrival = tuple[Any, int, int, int, float, float]
"""A batch that an iterator delivered: the `IteratorStats` of the iterator, the step, the numbers of rows and of tokens, and the
times of the request and of the arrival on `time.perf_counter`'s clock. A named tuple would take longer to make."""


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

    def stall_ended(self, step: int, seconds: float, error: BaseException | None) -> None:
        """A long wait of `next` for `step` ended after `seconds`: with the batch, or with `error`.

        This is called only if an observer set `IteratorStats.stalled` during the wait. After an error, the following `next`
        tries the step again.
        """

    def batches_counted(self, make_seconds: Sequence[float], arrivals: Sequence[Arrival]) -> None:
        """Take the counts of many batches at once. Only the observers of the process are called.

        Args:
          make_seconds: Seconds that each batch took to make, for the batches that this process made.
          arrivals: Batches that iterators of this process delivered.
        """

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
    base=Observer,
)

VIEWERS: Registry[Callable[..., None]] = Registry("viewer", PipelineError, {"text": "grain_sft.view.terminal:show"})
"""Functions that `Pipeline.show` calls, by name. Their arguments are a pipeline, a step, rows and a tokenizer."""


@functools.cache
def standing_observers() -> tuple[Observer, ...]:
    """Return the observers of this process, which are called for all its pipelines."""
    return tuple(OBSERVERS[name]() for name in ("metrics", "watchdog"))


def observers_of(pipeline: Pipeline) -> tuple[Observer, ...]:
    """Return the observers of this process and those of the pipeline."""
    return (*standing_observers(), *pipeline.observers)
