"""How Grain carries a pipeline's batches: as an iterator with state, a MapDataset, or a DataLoader."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import grain
from absl import logging

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.pipeline.delivery import StepIterator
from grain_sft.pipeline.observer import Delivery, make_batch, observers_of
from grain_sft.pipeline.read_ahead import ReadAhead
from grain_sft.source import Element, workers

if TYPE_CHECKING:
    from grain_sft.pipeline.pipeline import Pipeline

READ_THREADS = 2
PREFETCH = 8  # batches

_STEP = "next_step"
_PIPELINE = "pipeline"


class PipelineIterator(StepIterator[Element]):
    """Batches of a pipeline from some step on. Made by `Pipeline.iter`.

    Its state is the next step, whatever the threads and workers; `set_state` goes to another. A state is refused by
    the iterator of a pipeline with other data. A step that failed is tried again by the next `next`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        start_step: int = 0,
        threads: int = READ_THREADS,
        prefetch: int = PREFETCH,
        worker_count: int = 0,
    ) -> None:
        self._closed = True  # until there is something to close
        threads = as_integer("threads", threads, 0, PipelineError)
        prefetch = as_integer("prefetch", prefetch, 0, PipelineError)
        worker_count = as_integer("worker_count", worker_count, 0, PipelineError)
        self._first_steps = pipeline.first_steps
        self._direct = not threads and not worker_count
        self._threads, self._prefetch = threads, max(prefetch, threads)
        self._read_options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=self._prefetch if threads else 0
        )
        self._workers = grain.MultiprocessingOptions(num_workers=worker_count, per_worker_buffer_size=max(1, prefetch))
        self._from_workers: workers.InOrder | None = None
        super().__init__(pipeline, checked_step(pipeline, start_step))

    def _make(self, step: int) -> Element:
        batch = make_batch(self.pipeline, step) if self._direct else self._take(step)
        if self._first_steps.left:
            self._first_steps.check(self.pipeline, step, batch)
        return batch

    def _take(self, step: int) -> Element:
        """Return the batch of `step`, made ahead."""
        self._read_ahead(step)
        assert self._ahead is not None
        slot = self._ahead.get(step)
        if slot.error is None:
            assert slot.value is not None
            return slot.value
        error = slot.error
        self._stop()
        if workers.was_ended(error):
            raise PipelineError(
                f"a worker process was ended from outside while step {step} was awaited ({error}) Was memory "
                "short? The next next() starts new workers and makes this step again."
            ) from error
        raise error

    def worker_pids(self) -> list[int] | None:
        source = self._from_workers
        if source is None or source.iterator is None:
            return None
        pids = [process.pid for process in workers.processes(source.iterator)]
        turn = (self.next_step - source.start) % max(1, len(pids))
        return pids[turn:] + pids[:turn]

    def _record(self, step: int, delivery: Delivery) -> None:
        if self.pipeline.audit is not None:
            self.pipeline.audit.handed_out(self.pipeline, step, delivery)

    def start_prefetch(self) -> None:
        """Begin to make batches, so that the first is ready when it is asked for."""
        with self._lock:
            step, waiting = self._position
            if self._direct or self._closed or waiting or step >= self._end:
                return
            self._read_ahead(step)
            source = self._from_workers
        if source is not None:
            with source.started:  # no other process starts while workers do
                pass

    def _read_ahead(self, step: int) -> None:
        """Have batches from `step` on made, unless they are."""
        if self._ahead is None:
            if not self._workers.num_workers:
                self._ahead = ReadAhead(
                    functools.partial(make_batch, self.pipeline),
                    start=step,
                    end=self._end,
                    ahead=self._prefetch,
                    threads=self._threads,
                    name="grain_sft-read",
                )
            else:
                steps = Steps(self.pipeline, step).to_iter_dataset(self._read_options).mp_prefetch(self._workers)
                source = self._from_workers = workers.InOrder(steps, step)
                self._ahead = ReadAhead(
                    source.next,
                    start=step,
                    end=self._end,
                    ahead=1,
                    threads=1,
                    name="grain_sft-take",
                    close=source.close,
                )
        self._ahead.advance(step)

    def get_state(self) -> dict[str, Any]:
        """JSON-ready: the next step, and what the batches depend on but for the host."""
        return {_STEP: self.next_step, _PIPELINE: self.pipeline.data_key}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the step of `state`.

        Raises:
          PipelineError: the state of another pipeline, or of no pipeline.
          RowIndexError: a step that is not there.
        """
        if not isinstance(state, dict) or not isinstance(state.get(_STEP), int):
            raise PipelineError(f"not the state of a grain_sft pipeline: {state!r}; expected a '{_STEP}'.")
        expected = self.pipeline.data_key
        if state.get(_PIPELINE, expected) != expected:
            raise PipelineError(
                f"the state is of another pipeline.\n  state:    {state[_PIPELINE]}\n  pipeline: {expected}\n"
                "Give the run its old data, or start at a step of your choice with pipeline.iter(start_step=...)."
            )
        self._go_to(checked_step(self.pipeline, state[_STEP]))

    def _get_next_index(self) -> int:
        return self.next_step

    def _set_next_index(self, index: int) -> None:
        self.set_state({_STEP: index})

    def __str__(self) -> str:
        return f"PipelineIterator(next_step={self.next_step})"


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
        return make_batch(self._pipeline, self._start + index % self._length)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _worker_started(self._pipeline)

    def __str__(self) -> str:
        return f"GrainSftSteps(start={self._start})"


def _worker_started(pipeline: Pipeline) -> None:
    for observer in observers_of(pipeline):
        observer.worker_started(pipeline)


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
        return make_batch(self._pipeline, step)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _worker_started(self._pipeline)

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
            self._failure = "an exception"  # first of all: another may arrive
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
