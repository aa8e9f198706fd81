"""`Run`: the members of a pipeline that iterators and observers use. `Observer`: base of the objects called for each batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import grain

from grain_sft.pipeline.amendments import Amendment
from grain_sft.pipeline.receipt import Receipt
from grain_sft.sampling import Sampler
from grain_sft.source import Element, MixtureSource, NpyDataSource, RowSource
from grain_sft.types import Ints


class Run(Protocol):
    """Members of a `Pipeline`. Modules that pipeline.py imports use this type, because they can't import `Pipeline`."""

    source: NpyDataSource | MixtureSource
    sampler: Sampler
    transforms: tuple[grain.transforms.Map, ...]
    amendments: tuple[Amendment, ...]
    observers: tuple[Observer, ...]
    audit: Any  # the audit log, or None
    first_steps: Any  # the `FirstSteps`, which check the first batches

    @property
    def first_step(self) -> int: ...
    @property
    def end_step(self) -> int: ...
    @property
    def num_steps(self) -> int | None: ...
    @property
    def data_key(self) -> str: ...
    @property
    def receipt(self) -> Receipt: ...
    @property
    def stages(self) -> Sequence[Run]: ...
    @property
    def later_stages(self) -> list[str]: ...
    def at(self, step: int) -> Run: ...
    def source_at(self, step: int) -> RowSource: ...
    def __getitem__(self, step: int) -> Element: ...
    def read(self, step: int, slots: Ints, *, columns: tuple[int, int] | None = None) -> Element: ...


class ObservedIterator(Protocol):
    """Members of an iterator of a run's batches that observers may use.

    Attributes:
      stats: `IteratorStats` of the iterator.
      next_step: Step whose batch `next` returns.
    """

    pipeline: Run

    @property
    def stats(self) -> Any: ...
    @property
    def next_step(self) -> int: ...
    def worker_pids(self) -> list[int] | None:
        """Return the process ids of the workers, starting with the worker of the next batch; None if no workers run."""


Arrival = tuple[Any, int, tuple[int, ...], float, float]
"""Delivered batch: `IteratorStats` of the iterator, step, [rows, tokens of a row], and the times (`time.perf_counter`) of the
request and of the arrival. A plain tuple takes less time to make than a named tuple."""


class Delivery(NamedTuple):
    """One batch that an iterator hands out.

    Attributes:
      writer: Whether this process has the first row of the global batch. Only this process writes files, such as the audit log.
      rows: Number of rows of the batch; 0 if a transform returned something other than a dict of arrays.
      tokens: Number of tokens of the batch, padding included.
      seconds: Time that `next` waited for the batch.
    """

    pipeline: Run
    step: int
    writer: bool
    rows: int
    tokens: int
    seconds: float


class Observer:
    """Base class of observers. Its methods do nothing.

    Methods run in the thread that makes the batch or calls `next`, so methods have to be quick. An exception in a method ends
    the run. Observers have to be picklable, because worker processes get copies of them.
    """

    def iterator_opened(self, iterator: ObservedIterator) -> None:
        """An iterator was made."""

    def worker_started(self, pipeline: Run) -> None:
        """This process is a worker process, and begins to make batches of `pipeline`."""

    def batch_made(self, pipeline: Run, step: int, seconds: float) -> None:
        """A thread of this process made the batch of `step`, perhaps ahead of time, in `seconds`."""

    def batch_handed_out(self, delivery: Delivery) -> None:
        """The trainer gets a batch now.

        If an exception interrupts `next`, the following `next` calls this method again with the same `delivery`.
        """

    def stall_ended(self, step: int, seconds: float, error: BaseException | None) -> None:
        """A long wait of `next` for `step` ended after `seconds`: with the batch, or with `error`.

        This is called only if an observer set `IteratorStats.stalled` during the wait.
        """

    def batches_counted(self, make_seconds: Sequence[float], arrivals: Sequence[Arrival]) -> None:
        """Take the times of many batches at once. Only this package's own observers, metrics and watchdog, get this call.

        Args:
          make_seconds: Seconds that this process took to make each batch.
          arrivals: Batches that iterators of this process delivered.
        """

    def iterator_closed(self, iterator: ObservedIterator) -> None:
        """An iterator was closed. Garbage collection of an iterator does not call this."""
