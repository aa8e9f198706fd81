"""A pipeline's batches as Grain's objects: a `grain.MapDataset`, and a `grain.DataLoader` that stops when a batch fails."""

import pickle
from typing import Any

import cloudpickle
import grain
import numpy as np
from absl import logging

from grain_sft.arguments import MOST_AHEAD, as_integer, check_type
from grain_sft.errors import PipelineError, RowIndexError, shortened
from grain_sft.pipeline.counts import make_batch
from grain_sft.pipeline.observer import observers_of
from grain_sft.pipeline.run import Run
from grain_sft.pipeline.step_iterator import checked_step, no_stop_iteration
from grain_sft.registry import entry_errors, is_ours, name_of
from grain_sft.source import Element, workers

_THREADS, _PREFETCH = 2, 8  # numbers of threads and of batches that are made ahead, in a loader without worker processes


class StepDataset(grain.MapDataset[Element]):
    """Batches of a pipeline: item 0 is the batch of step `start`. An index past the end wraps around."""

    def __init__(self, pipeline: Run, start: int) -> None:
        super().__init__()
        self._pipeline, self._start = pipeline, start
        self._length = pipeline.end_step - start

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        step = self._start + index % self._length
        make = _sendable_batch if workers.in_worker() else make_batch
        with no_stop_iteration(step):
            return make(self._pipeline, step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a worker process. Refuse an object of another package that can't be pickled, such as a lock.

        The check copies no arrays: with a `buffer_callback`, the pickle leaves them out.
        """
        for stage in self._pipeline.stages:
            for each in (*stage.transforms, *stage.source.layout.parts.values(), *self._pipeline.observers):
                fix = "Leave out what can't be pickled in a method `__getstate__`, or use no worker processes."
                with entry_errors(PipelineError, f"{name_of(type(each))} can't be sent to worker processes", fix):
                    if not is_ours(type(each)):
                        cloudpickle.dumps(each, buffer_callback=lambda array: None)
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # Grain pickles the dataset for its worker processes, so this process is a worker
        for observer in observers_of(self._pipeline):
            observer.worker_started(self._pipeline)

    def __str__(self) -> str:
        return f"GrainSftSteps(start={self._start})"

    def __repr__(self) -> str:
        return repr(self._pipeline)  # Grain compares this text when it restores the state of a DataLoader


def _sendable_batch(pipeline: Run, step: int) -> Any:
    """Return the batch of `step` in a worker process. Refuse a batch or an exception that pickle does not restore.

    Grain leaves out a batch that it can't pickle, so that the worker's next batch takes its place. If Grain can't pickle an
    exception, the main process waits forever.
    """
    try:
        batch = make_batch(pipeline, step)
        values = batch.values() if isinstance(batch, dict) else [batch]
        sent = [each for each in values if not isinstance(each, np.ndarray) or each.dtype.hasobject]
    except Exception as error:
        batch, sent = error, [error]
    what = f"step {step}: a worker process can't send {shortened(repr(sent))} to the main process"
    with entry_errors(PipelineError, what, "Let pickle restore it, or use no worker processes."):
        pickle.loads(pickle.dumps(sent))
    if isinstance(batch, Exception):
        raise batch
    return batch


def make_data_loader(pipeline: Run, worker_count: int, start_step: int) -> grain.DataLoader:
    """Return the result of `Pipeline.data_loader`."""
    worker_count = as_integer("worker_count", worker_count, 0, PipelineError, MOST_AHEAD)
    if pipeline.audit is not None:
        logging.warning("The batches of a DataLoader are not in the audit log. Take them from pipeline.iter().")
    threads = 0 if worker_count else _THREADS
    return _BatchLoader(
        data_source=StepDataset(pipeline, 0),
        sampler=_StepSampler(pipeline, start_step),
        worker_count=worker_count,
        worker_buffer_size=2,
        read_options=grain.ReadOptions(num_threads=threads, prefetch_buffer_size=_PREFETCH if threads else 0),
    )


class _StepSampler:
    """Grain sampler of the steps from `start` to the end of the run. The key of a record is its step."""

    def __init__(self, pipeline: Run, start: int) -> None:
        self._start = checked_step(pipeline, start)
        self._length = pipeline.end_step - self._start
        self._shard_options = grain.sharding.NoSharding()  # grain.DataLoader reads this attribute

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        if not 0 <= index < self._length:
            raise RowIndexError(f"step {self._start + index}: the run ends before it. Start at an earlier step.")
        return grain.RecordMetadata(index=index, record_key=self._start + index)

    def __repr__(self) -> str:
        return f"Steps(start={self._start}, count={self._length})"


class _BatchLoader(grain.DataLoader):
    """DataLoader whose workers start when its iterator is made, instead of at the first batch. It makes `_BatchIterator`s."""

    def __iter__(self) -> Any:
        iterator: Any = super().__iter__()
        if self.multiprocessing_options.num_workers:
            workers.stop_with(iterator, workers.start(iterator))  # stops the workers when `iterator` is garbage-collected
        iterator.__class__ = _BatchIterator  # Grain made the iterator, and has no option for its class
        return iterator


class _BatchIterator(grain.DataLoaderIterator):
    """Iterator that raises an error in each `next` after a batch failed. Grain's iterator would skip the batch."""

    _failure = ""

    def set_state(self, state: bytes) -> None:
        check_type("state", state, bytes, "bytes, from get_state() of an iterator of this data_loader()")
        super().set_state(state)

    def __next__(self) -> Any:
        if self._failure:
            problem = f"a batch of this DataLoader failed before ({self._failure}), and going on would skip it"
            fix = "Make another DataLoader with start_step=..., or use pipeline.iter(), which tries the step again"
            raise PipelineError(f"{problem}. {fix}.")
        try:
            return super().__next__()
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = "an exception"  # in case Ctrl-C interrupts `str(error)`
            self._failure = str(error) or type(error).__name__
            workers.stop(self._iterator)
            if workers.was_ended(error):
                raise PipelineError(f"a worker process was ended from outside ({error}). Was memory short?") from error
            raise
