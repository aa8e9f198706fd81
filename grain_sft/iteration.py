"""How Grain carries a pipeline's batches: as an iterator with state, a MapDataset, or a DataLoader."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import grain
from absl import logging
from grain.experimental import set_next_index

from grain_sft import workers
from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.sources import Element
from grain_sft.watching import making, places, watchdog

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

READ_THREADS = 2
PREFETCH = 8  # batches

_STEP = "next_step"
_PIPELINE = "pipeline"


class PipelineIterator(grain.DatasetIterator[Element]):
    """Batches of a pipeline from some step on. Made by `Pipeline.iter`.

    Its state is the next step, whatever the threads and workers; `set_state` goes to another. A state is refused by
    the iterator of a pipeline with other data. A step that failed is tried again by the next `next`.
    """

    def __init__(self, pipeline: Pipeline, start_step: int, threads: int, prefetch: int, worker_count: int) -> None:
        super().__init__()
        self._closed = True  # until there is something to close
        self._lock = threading.RLock()  # several threads may take batches from one iterator: each step goes to one
        self._inner: grain.DatasetIterator[Element] | None = None
        self._at_exit: weakref.finalize[..., PipelineIterator] | None = None
        threads = as_integer("threads", threads, 0, PipelineError)
        prefetch = as_integer("prefetch", prefetch, 0, PipelineError)
        worker_count = as_integer("worker_count", worker_count, 0, PipelineError)
        self._pipeline, self._first_steps = pipeline, pipeline.first_steps
        self._direct = not threads and not worker_count
        self._read_options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(prefetch, threads) if threads else 0
        )
        self._workers = grain.MultiprocessingOptions(num_workers=worker_count, per_worker_buffer_size=max(1, prefetch))
        self._step = self._inner_start = checked_step(pipeline, start_step)
        self._end = pipeline.end_step
        self._watch = watchdog.Watch(self, pipeline if self._direct else None)
        self._closed = False

    def __next__(self) -> Element:
        with self._lock:
            step, watch = self._step, self._watch
            if self._closed or step >= self._end:
                self._over()
            watch.begin(step)
            try:
                if self._direct:
                    batch = self._pipeline[step]
                    if self._first_steps.left:
                        self._first_steps.check(self._pipeline, step, batch)
                    if self._pipeline.audit is not None:
                        self._write_audit()
                else:
                    batch = self._take()
            except BaseException:
                watch.failed()
                raise
            watch.came(batch)
            self._step = step + 1
            return batch

    def _over(self) -> NoReturn:
        if self._closed:
            raise PipelineError("the iterator was closed. Make another with pipeline.iter(start_step=...).")
        self._stop()
        raise StopIteration

    def _take(self) -> Element:
        """The batch of the next step, made ahead."""
        self.start_prefetch()
        assert self._inner is not None
        try:
            batch: Element = next(self._inner)
            if self._first_steps.left:
                self._first_steps.check(self._pipeline, self._step, batch)
            self._write_audit()
            return batch
        except BaseException as error:  # what was made ahead is no longer in step
            self._stop()
            if workers.was_ended(error):
                raise PipelineError(
                    f"a worker process was ended from outside while step {self._step} was awaited ({error}) Was memory "
                    "short? The next next() starts new workers and makes this step again."
                ) from error
            raise

    def whereabouts(self) -> list[str]:
        """What makes the batch that is waited for, and where it is: a line each."""
        inner = self._inner
        if not self._workers.num_workers or inner is None:
            return places.of_makers(self._pipeline)
        return places.of_workers(workers.processes(inner), self._step - self._inner_start)

    def _write_audit(self) -> None:
        """Say in the audit log, if there is one, that the batch of the next step is handed out."""
        if self._pipeline.audit is not None:
            self._pipeline.audit.handed_out(self._pipeline, self._step)

    @property
    def next_step(self) -> int:
        """The step whose batch `next` returns."""
        return self._step

    def start_prefetch(self) -> None:
        """Begin to make batches, so that the first is ready when it is asked for."""
        with self._lock:
            if self._inner is not None or self._direct or self._closed or self._step >= self._pipeline.end_step:
                return
            if not self._workers.num_workers:
                inner = Steps(self._pipeline, 0).to_iter_dataset(self._read_options).__iter__()
                set_next_index(inner, self._step)
                inner.start_prefetch()
            else:
                steps = Steps(self._pipeline, self._step).to_iter_dataset(self._read_options)
                inner = steps.mp_prefetch(self._workers).__iter__()
                workers.start(inner)
                self._at_exit = weakref.finalize(self, workers.stop, inner)  # also when the interpreter exits
            self._inner, self._inner_start = inner, self._step

    def get_state(self) -> dict[str, Any]:
        """JSON-ready: the next step, and what the batches depend on but for the host."""
        return {_STEP: self._step, _PIPELINE: self._pipeline.data_key}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the step of `state`.

        Raises:
          PipelineError: the state of another pipeline, or of no pipeline.
          RowIndexError: a step that is not there.
        """
        if not isinstance(state, dict) or not isinstance(state.get(_STEP), int):
            raise PipelineError(f"not the state of a grain_sft pipeline: {state!r}; expected a '{_STEP}'.")
        expected = self._pipeline.data_key
        if state.get(_PIPELINE, expected) != expected:
            raise PipelineError(
                f"the state is of another pipeline.\n  state:    {state[_PIPELINE]}\n  pipeline: {expected}\n"
                "Give the run its old data, or start at a step of your choice with pipeline.iter(start_step=...)."
            )
        step = checked_step(self._pipeline, state[_STEP])
        with self._lock:
            self._stop()
            self._step = step

    def close(self) -> None:
        """Stop threads and workers. `next` raises afterwards."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._watch.open = False
                self._stop()

    def _stop(
        self,
        ends: Callable[[], bool] = sys.is_finalizing,
        close_workers: Callable[[grain.DatasetIterator[Element]], None] = workers.close,
    ) -> None:
        """Called also while the interpreter ends: the names of this module may be gone, and no thread starts any more.
        Worker processes were stopped before that (see `start_prefetch`)."""
        inner, self._inner = self._inner, None
        if inner is None:
            return
        if not self._workers.num_workers:
            inner.close()
        elif not ends():
            close_workers(inner)
            if self._at_exit is not None:
                self._at_exit.detach()

    def _get_next_index(self) -> int:
        return self._step

    def _set_next_index(self, index: int) -> None:
        self.set_state({_STEP: index})

    def __str__(self) -> str:
        return f"PipelineIterator(next_step={self._step})"


class Steps(grain.MapDataset[Element]):
    """Batches from `start` on, as Grain indexes them: past the end it begins again."""

    def __init__(self, pipeline: Pipeline, start: int) -> None:
        super().__init__()
        self._pipeline, self._start = pipeline, start
        self._length = pipeline.end_step - start

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return making.make(self._pipeline, self._start + index % self._length)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        watchdog.watch_worker()

    def __str__(self) -> str:
        return f"GrainSftSteps(start={self._start})"


def make_data_loader(pipeline: Pipeline, worker_count: int, start_step: int) -> grain.DataLoader:
    """The loader that `Pipeline.data_loader` returns."""
    worker_count = as_integer("worker_count", worker_count, 0, PipelineError)
    if pipeline.audit is not None:
        logging.warning("The batches of a DataLoader are not in the audit log. Take them from pipeline.iter().")
    threads = 0 if worker_count else READ_THREADS
    return _BatchLoader(
        data_source=_StepSource(pipeline),
        sampler=_StepSampler(pipeline, start_step),
        worker_count=worker_count,
        worker_buffer_size=2,
        read_options=grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCH if threads else 0),
    )


class _StepSource(grain.sources.RandomAccessDataSource[Element]):
    """A pipeline as a data source: record k is the batch of step k."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __len__(self) -> int:
        return self._pipeline.end_step

    def __getitem__(self, step: int) -> Element:
        return making.make(self._pipeline, step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        watchdog.watch_worker()

    def __repr__(self) -> str:
        return repr(self._pipeline)


class _StepSampler:
    """Steps from `start` on, one after the other."""

    def __init__(self, pipeline: Pipeline, start: int) -> None:
        self._start = checked_step(pipeline, start)
        self._length = pipeline.end_step - self._start
        self._shard_options = grain.sharding.NoSharding()  # where grain.DataLoader looks for it

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        if not 0 <= index < self._length:
            raise RowIndexError(f"step {self._start + index}: after the last.")
        return grain.RecordMetadata(index=index, record_key=self._start + index)

    def __repr__(self) -> str:
        return f"Steps(start={self._start}, count={self._length})"


class _BatchLoader(grain.DataLoader):
    """A DataLoader whose worker processes start wherever it is iterated."""

    def __iter__(self) -> Iterator[Element]:
        iterator: Any = super().__iter__()
        if self.multiprocessing_options.num_workers:
            workers.start(iterator)
            weakref.finalize(iterator, workers.stop, iterator._iterator)
        iterator.__class__ = _BatchIterator
        typed: Iterator[Element] = iterator
        return typed


class _BatchIterator(grain.DataLoaderIterator):
    """A DataLoader's iterator that stops for good where a batch failed. Grain's own goes on with the batch after it: that
    step would be lost, and nobody told."""

    _failure = ""

    def __next__(self) -> Element:
        if self._failure:
            raise PipelineError(
                f"a batch of this DataLoader failed before ({self._failure}), and would be left out now. Make another with "
                "data_loader(start_step=...), or take pipeline.iter(), which tries that step again."
            )
        try:
            batch: Element = super().__next__()
            return batch
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            workers.close(self._iterator)  # the other workers end too
            if workers.was_ended(error):
                raise PipelineError(f"a worker process was ended from outside ({error}) Was memory short?") from error
            raise


def checked_step(pipeline: Pipeline, step: object) -> int:
    """A step that a run may go on at, the one after the last included.

    Raises:
      RowIndexError: there is no such step.
      SamplerError: from there on, the hosts don't divide the batch of some step of a schedule.
    """
    number = as_integer("step", step, 0, RowIndexError)
    if number > pipeline.end_step:
        raise RowIndexError(f"step={number}: expected 0 to {pipeline.end_step}, which is the end.")
    pipeline.sampler.check_from(number)  # a run should not end where a schedule has a batch that its hosts can't divide
    return number
