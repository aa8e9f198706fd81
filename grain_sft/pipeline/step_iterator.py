"""StepIterator: batches of consecutive steps, each delivered once, even if exceptions arrive at any moment."""

import abc
import contextlib
import math
import threading
from collections.abc import Iterator
from time import perf_counter
from typing import Any, TypeVar

import grain

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.pipeline.counts import MOST_UNCOUNTED, IteratorStats, arrivals, count_batches
from grain_sft.pipeline.observer import observers_of
from grain_sft.pipeline.read_ahead import ReadAhead
from grain_sft.pipeline.run import Arrival, Delivery, Observer, Run
from grain_sft.registry import entry_errors

T = TypeVar("T")


class _EndOfRun(StopIteration):
    """The step after the last was requested."""


@contextlib.contextmanager
def no_stop_iteration(step: int) -> Iterator[None]:
    """Turn a StopIteration of an observer or order into a PipelineError. It would end the run silently."""
    try:
        yield
    except StopIteration as error:
        fix = "If it calls next(), give that call a default."
        with entry_errors(PipelineError, f"step {step}: an observer or order", fix):
            raise error


class StepIterator(grain.DatasetIterator[T]):
    """Iterator over the batches of consecutive steps. Several threads may call `next`; each batch goes to one of them.

    An exception may arrive at any moment inside `next`: from Ctrl-C, a signal handler, or another thread. Afterwards,
    `next_step` and the iterator's state still name the step that was not delivered. To ensure this, a batch stays in
    `_undelivered` until just before `next` returns. If a step failed, the following call of `next` tries the step again.

    Subclasses define `_makes_ahead` and `_reader_from`, and call `__init__` last. If a subclass then sets `_takes_ready`,
    `next` does not call `_make` for a batch that is ready. If the trainer pauses 5 ms after each batch, `next` takes 39 us
    this way, and 76 us with `_make` (`bench --only windows`).
    """

    _closed = True  # so that `close` does nothing if `__init__` fails; Grain's constructor sets it to False
    _makes_ahead: bool  # whether other threads or processes make the batches, ahead of `next`

    def __init__(self, pipeline: Run, start: int) -> None:
        self._next = checked_step(pipeline, start)
        self._undelivered: dict[int, tuple[T, Arrival, Delivery | None]] = {}  # batches that were made, by step
        self.pipeline, self._stats, self._observers = pipeline, IteratorStats(), observers_of(pipeline)
        # observers that define `batch_handed_out`: a call of the empty method would take a microsecond
        self._recorders = [each for each in self._observers if type(each).batch_handed_out != Observer.batch_handed_out]
        self._lock = threading.RLock()
        self._ahead: ReadAhead[T] | None = None
        self._end, self._takes_ready = pipeline.end_step, False
        super().__init__()
        for observer in self._observers:
            observer.iterator_opened(self)

    @abc.abstractmethod
    def _reader_from(self, step: int) -> ReadAhead[T]:
        """Return the object that makes batches ahead, from `step` on. It is called only if `_makes_ahead` is True."""

    def _is_writer(self, step: int) -> bool:
        """Return whether this process has the first row of the batch of `step`, as in `Delivery.writer`."""
        return self.pipeline.sampler.host.index == 0

    def worker_pids(self) -> list[int] | None:
        """Return the process ids of the workers, starting with the worker of the next batch; None if no workers run."""
        return None

    @property
    def stats(self) -> IteratorStats:
        """Counts of all batches that were delivered until now."""
        count_batches()
        return self._stats

    def __next__(self) -> T:
        taken = -1
        try:
            with self._lock:
                try:
                    step = self._offer()
                except _EndOfRun:
                    raise StopIteration from None
                except StopIteration as error:  # raised by other code
                    with no_stop_iteration(self.next_step):
                        raise error
                batch, _, _ = undelivered = self._undelivered[step]
                taken = step
                del self._undelivered[step]
            return batch
        except BaseException:
            # This block calls no function, not even to lock, because another exception could arrive in the call. It needs no
            # lock: assigning to one key of a dict is safe while another thread makes a batch.
            if taken >= 0:
                self._undelivered[taken] = undelivered
            raise

    def _offer(self) -> int:
        """Put the next batch to deliver into `_undelivered`, call the observers, and return its step.

        A batch that was put back after an exception comes first.
        """
        if self._undelivered:
            step = min(self._undelivered)
        else:
            step = self._next
            since, ahead = perf_counter(), self._ahead
            # `result.value` is None until a thread has made the batch
            result = ahead.results.get(step) if ahead is not None and self._takes_ready else None
            batch: Any = self._wait(step, since) if result is None or result.value is None else result.value
            try:  # inline, because a call would add 0.7 % to the time of materialized rows of long documents
                shape = tuple(next(iter(batch.values())).shape) or (0,)
                if "chosen_ids" in batch:  # the tokens of preference pairs are in `prompt_ids`, `chosen_ids` and `rejected_ids`
                    shape = shape[0], sum(array.shape[1] for key, array in batch.items() if key.endswith("_ids"))
            except (AttributeError, TypeError, StopIteration):  # a transform made something else than a dict of arrays
                shape = (0,)
            now, delivery = perf_counter(), None
            if self._recorders:
                delivery = Delivery(self.pipeline, step, self._is_writer(step), shape[0], math.prod(shape), now - since)
            self._undelivered[step] = batch, (self._stats, step, shape, since, now), delivery
            self._next = step + 1
            # `_ahead` must not keep the batch in memory. Before step `ahead.due`, no call of `advance` is needed.
            if result is not None and ahead is not None and step < ahead.due:
                result.value = None
            elif self._ahead is not None:
                self._ahead.advance(step + 1)
        _, arrival, delivery = self._undelivered[step]
        arrivals.append(arrival)
        if len(arrivals) > MOST_UNCOUNTED:
            count_batches()
        if delivery is not None:
            for recorder in self._recorders:
                recorder.batch_handed_out(delivery)
        return step

    def _wait(self, step: int, since: float) -> T:
        """Return the batch of `step`, which was requested at the time `since`."""
        if self._closed:
            raise PipelineError("the iterator was closed. Make another with pipeline.iter(start_step=...).")
        if step >= self._end:
            self._stop()
            raise _EndOfRun
        stats = self._stats
        stats.waiting = step, since
        try:
            batch = self._make(step)
            stats.waiting = None
            if stats.stalled is not None:
                self._end_stall(step, since, None)
            return batch
        except BaseException as error:
            stats.waiting = None
            if stats.stalled is not None:
                self._end_stall(step, since, error)
            raise

    def _end_stall(self, step: int, since: float, error: BaseException | None) -> None:
        """Call the observers if one of them marked the wait for `step` as a stall."""
        stalled, self._stats.stalled = self._stats.stalled, None
        # an observer may have set the mark just after an earlier wait had ended
        if stalled == (step, since):
            for observer in self._observers:
                observer.stall_ended(step, perf_counter() - since, error)

    def _make(self, step: int) -> T:
        """Return the batch of `step` that a thread or process made ahead."""
        if self._ahead is None:
            self._ahead = self._reader_from(step)
        result = self._ahead.get(step)
        if result.error is not None:
            self._stop()
            raise result.error
        assert result.value is not None
        return result.value

    def start_prefetch(self) -> None:
        """Begin to make batches, before the trainer requests the first."""
        with self._lock:
            if self._makes_ahead and not self._closed and not self._undelivered and self._next < self._end:
                if self._ahead is None:
                    self._ahead = self._reader_from(self._next)
                self._ahead.advance(self._next)

    @property
    def next_step(self) -> int:
        """Step whose batch `next` returns."""
        return min(self._undelivered, default=self._next)

    def _go_to(self, step: int) -> None:
        with self._lock:
            self._stop()
            self._next, self._undelivered = step, {}

    def close(self) -> None:
        """Stop threads and workers. Afterwards, `next` raises a PipelineError."""
        if self._closed:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._next, self._undelivered = self.next_step, {}
            self._stop()
        for observer in self._observers:
            observer.iterator_closed(self)

    def _stop(self) -> None:
        """Stop making batches ahead, and drop the batches that are ready."""
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()

    def __str__(self) -> str:
        return f"{type(self).__name__}(next_step={self.next_step})"


def checked_step(pipeline: Run, step: object) -> int:
    """Return `step` as an int if a run may continue there: at a step of the pipeline, or at its end.

    Raises:
      RowIndexError: The pipeline does not have the step.
      SamplerError: The number of hosts does not divide the batch size of a later step.
    """
    number = as_integer("step", step, 0, RowIndexError)
    if number > pipeline.end_step:
        raise RowIndexError(f"step={number}: expected 0 to {pipeline.end_step}, which is the end.")
    pipeline.sampler.check_from(number)
    return number
