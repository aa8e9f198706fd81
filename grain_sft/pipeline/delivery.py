"""Iterators over steps that deliver each step once, whatever is raised while they do."""

from __future__ import annotations

import abc
import threading
import time
from typing import TYPE_CHECKING, NoReturn, TypeVar

import grain

from grain_sft.errors import PipelineError
from grain_sft.pipeline.observer import Delivery, IteratorStats, observers_of
from grain_sft.pipeline.read_ahead import ReadAhead

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline

T = TypeVar("T")


class StepIterator(grain.DatasetIterator[T]):
    """Iterator over the batches of consecutive steps. Several threads may take from it: each step goes to one.

    An exception may arrive at any moment inside `next`: Ctrl-C, a signal handler that raises, one that another thread sets. The
    step that was not delivered then is the one of the next `next`, and of the state. So a batch that is made is kept in
    `_position` until the moment of the return, and put back there where something is raised after that.

    Subclasses call `__init__` last, and define `_make` and `_record`.

    Attributes:
      pipeline: Pipeline whose batches these are.
      stats: What was handed out so far, and what is waited for.
    """

    _closed: bool

    def __init__(self, pipeline: Pipeline, start: int) -> None:
        super().__init__()
        self.pipeline, self.stats, self._observers = pipeline, IteratorStats(), observers_of(pipeline)
        self._lock = threading.RLock()
        self._ahead: ReadAhead[T] | None = None
        self._end = pipeline.end_step
        self._position: tuple[int, dict[int, tuple[T, Delivery]]] = start, {}
        """Step to make next, and what was made and not delivered, by step: the batch, and its `Delivery`.
        Replaced as a whole, never changed."""
        for observer in self._observers:
            observer.iterator_opened(self)

    @abc.abstractmethod
    def _make(self, step: int) -> T:
        """Return the batch of `step`."""

    @abc.abstractmethod
    def _record(self, step: int, delivery: Delivery) -> None:
        """Record that the batch of `step` is delivered, once for each `delivery`."""

    def worker_pids(self) -> list[int] | None:
        """Return the worker processes that make batches, the one whose turn it is first; None where threads of this process
        make them."""
        return None

    def __next__(self) -> T:
        taken = -1
        try:
            with self._lock:
                if self._closed:
                    raise PipelineError("the iterator was closed. Make another with pipeline.iter(start_step=...).")
                if not self._position[1]:
                    self._make_next()
                following, waiting = self._position
                step = min(waiting)
                batch, delivery = made = waiting[step]
                self._record(step, delivery)
                for observer in self._observers:
                    observer.batch_handed_out(delivery)
                rest = {each: waiting[each] for each in waiting if each != step} if len(waiting) > 1 else {}
                taken = step
                self._position = following, rest
            return batch
        except BaseException:  # nothing in here is a call, after which an exception could arrive
            if taken >= 0:
                following, waiting = self._position
                self._position = following, {**waiting, taken: made}
            raise

    def _make_next(self) -> None:
        step, _ = self._position
        if step >= self._end:
            self._over()
        stats, since = self.stats, time.perf_counter()
        stats.waiting = step, since
        try:
            batch = self._make(step)
        except BaseException as error:
            stats.waiting = None
            for observer in self._observers:
                observer.batch_failed(self, step, time.perf_counter() - since, error)
            raise
        delivery = Delivery(self.pipeline, step, *stats.arrived(step, batch, since))
        self._position = step + 1, {step: (batch, delivery)}
        if self._ahead is not None:
            self._ahead.advance(step + 1)

    def _over(self) -> NoReturn:
        self._stop()
        raise StopIteration

    @property
    def next_step(self) -> int:
        """The step whose batch `next` returns."""
        following, waiting = self._position
        return min(waiting) if waiting else following

    def _go_to(self, step: int) -> None:
        """Make `step` the next one."""
        with self._lock:
            self._stop()
            self._position = step, {}

    def close(self) -> None:
        """Stop threads and workers. `next` raises afterwards."""
        if self._closed:
            return
        with self._lock:
            self._closed = True
            self._position = self.next_step, {}
            self._stop()
        for observer in self._observers:
            observer.iterator_closed(self)

    def _stop(self) -> None:
        """Drop what is made ahead."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
