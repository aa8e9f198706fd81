"""Pipeline: what batch does the trainer get at step k?"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
from grain.experimental import set_next_index

from grain_sft import workers
from grain_sft.errors import PipelineError, RowIndexError
from grain_sft.sampling import IndexSampler
from grain_sft.sources import Element, NpyDataSource

READ_THREADS = 2
PREFETCH = 8  # batches

_STEP = "next_step"
_PIPELINE = "pipeline"


class Pipeline:
    """Batches by step: the sampler's rows, read at once by the source, through the transforms in order.

    A step's batch depends on nothing but the step: `pipeline[step]`, `pipeline.iter`, `pipeline.dataset()` and
    `pipeline.data_loader()` give the same arrays, whatever the number of threads and worker processes.

    Arrays that are the same in every batch are shared between batches and read-only; copy one before writing to it.

    Args:
      source: an `NpyDataSource`.
      sampler: of as many rows as the source has.
      transforms: grain `Map` transforms that take batches [rows, L], e.g. `[NgramFilter(), ShiftTargets()]`.

    Raises:
      PipelineError: a sampler for another number of rows, or a transform that is no `Map`.
    """

    def __init__(
        self, source: NpyDataSource, sampler: IndexSampler, transforms: Sequence[grain.transforms.Map] = ()
    ) -> None:
        if sampler.num_instances != len(source):
            raise PipelineError(
                f"the sampler is for {sampler.num_instances} rows, but the source has {len(source)}: "
                "make it with IndexSampler(len(source), ...)."
            )
        for transform in transforms:
            if not isinstance(transform, grain.transforms.Map):
                raise PipelineError(
                    f"transform {transform!r} is no grain.transforms.Map. A pipeline reads whole batches, so it takes "
                    "no Batch, and every row of every step is kept, so it takes no Filter."
                )
        self.source, self.sampler, self.transforms = source, sampler, tuple(transforms)

    def __getitem__(self, step: int) -> Element:
        """This host's batch of `step`.

        Raises:
          RowIndexError: a negative step, or one after the last epoch.
          CorpusFileError: a token file is missing, unreadable, or not the one that was indexed.
        """
        element = self.source.read(self.sampler.rows(step))
        for transform in self.transforms:
            element = transform.map(element)
        return element

    def __len__(self) -> int:
        """Steps there are: `sys.maxsize` where they never end."""
        return sys.maxsize if self.sampler.num_steps is None else self.sampler.num_steps

    def __iter__(self) -> PipelineIterator:
        return self.iter()

    def iter(
        self,
        start_step: int = 0,
        *,
        threads: int = READ_THREADS,
        prefetch: int = PREFETCH,
        worker_count: int = 0,
    ) -> PipelineIterator:
        """Iterator of the batches from `start_step` on, made ahead of time.

        Args:
          start_step: of the first batch. Starting at a late step costs what starting at 0 costs.
          threads: that read ahead, in this process or in each worker. 0 reads when asked.
          prefetch: batches kept ready, in this process or in each worker.
          worker_count: Grain worker processes. 0 is the fastest where the data come from memory or a local disk.

        Returns:
          A `grain.DatasetIterator`; close it, or let it be collected, to stop its threads and workers.

        Raises:
          RowIndexError: a step that is not there.
        """
        return PipelineIterator(self, start_step, threads, prefetch, worker_count)

    def dataset(self) -> grain.MapDataset[Element]:
        """The batches as a `grain.MapDataset`: element k is step k. As long as the pipeline."""
        return _Steps(self, 0)

    def data_loader(self, worker_count: int = 0, start_step: int = 0) -> grain.DataLoader:
        """A `grain.DataLoader` whose elements are the batches from `start_step` on.

        Elements are whole batches, so that the number of worker processes changes nothing. For a loader of single
        records give `grain.DataLoader` the source and the sampler themselves, and no worker processes.

        Raises:
          RowIndexError: a step that is not there.
        """
        threads = 0 if worker_count else READ_THREADS
        return _BatchLoader(
            data_source=_StepSource(self),
            sampler=_StepSampler(self, start_step),
            worker_count=worker_count,
            worker_buffer_size=2,
            read_options=grain.ReadOptions(num_threads=threads, prefetch_buffer_size=PREFETCH if threads else 0),
        )

    def __repr__(self) -> str:
        """What decides its batches and nothing else."""
        return f"Pipeline({self.source!r}, {self.sampler!r}, {list(self.transforms)!r})"


class PipelineIterator(grain.DatasetIterator[Element]):
    """Batches of a pipeline from some step on. Made by `Pipeline.iter`.

    Its state is the next step, whatever the threads and workers; `set_state` goes to another. A state is refused by
    the iterator of a pipeline with other data.
    """

    def __init__(self, pipeline: Pipeline, start_step: int, threads: int, prefetch: int, worker_count: int) -> None:
        super().__init__()
        self._closed = False
        self._inner: grain.DatasetIterator[Element] | None = None
        for name, value in (("threads", threads), ("prefetch", prefetch), ("worker_count", worker_count)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise PipelineError(f"{name}={value!r}: expected 0 or more.")
        self._pipeline = pipeline
        self._read_options = grain.ReadOptions(
            num_threads=threads, prefetch_buffer_size=max(prefetch, threads) if threads else 0
        )
        self._workers = grain.MultiprocessingOptions(num_workers=worker_count, per_worker_buffer_size=max(1, prefetch))
        self._direct = not threads and not worker_count
        self._step = self._checked(start_step)

    def __next__(self) -> Element:
        if self._closed:
            raise ValueError("the iterator was closed.")
        if self._direct:
            if self._step >= len(self._pipeline):
                raise StopIteration
            batch = self._pipeline[self._step]
        else:
            self.start_prefetch()
            assert self._inner is not None
            batch = next(self._inner)
        self._step += 1
        return batch

    @property
    def next_step(self) -> int:
        """The step whose batch `next` returns."""
        return self._step

    def start_prefetch(self) -> None:
        """Begin to make batches, so that the first is ready when it is asked for."""
        if self._inner is not None or self._direct:
            return
        if not self._workers.num_workers:
            inner = _Steps(self._pipeline, 0).to_iter_dataset(self._read_options).__iter__()
            set_next_index(inner, self._step)
            inner.start_prefetch()
        else:
            steps = _Steps(self._pipeline, self._step).to_iter_dataset(self._read_options)
            inner = steps.mp_prefetch(self._workers).__iter__()
            workers.start(inner)
        self._inner = inner

    def get_state(self) -> dict[str, Any]:
        """JSON-ready: the next step, and what the batches depend on but for the host."""
        return {_STEP: self._step, _PIPELINE: _state_key(self._pipeline)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go to the step of `state`.

        Raises:
          PipelineError: the state of another pipeline, or of no pipeline.
          RowIndexError: a step that is not there.
        """
        if not isinstance(state, dict) or not isinstance(state.get(_STEP), int):
            raise PipelineError(f"not the state of a grain_sft pipeline: {state!r}; expected a '{_STEP}'.")
        expected = _state_key(self._pipeline)
        if state.get(_PIPELINE, expected) != expected:
            raise PipelineError(
                f"the state is of another pipeline.\n  state:    {state[_PIPELINE]}\n  pipeline: {expected}\n"
                "Give the run its old data, or start at a step of your choice with pipeline.iter(start_step=...)."
            )
        step = self._checked(state[_STEP])
        self._stop()
        self._step = step

    def close(self) -> None:
        """Stop threads and workers. `next` raises afterwards."""
        if not self._closed:
            self._closed = True
            self._stop()

    def _checked(self, step: int) -> int:
        if not 0 <= step <= len(self._pipeline):
            raise RowIndexError(f"step {step}: expected 0 to {len(self._pipeline)}.")
        return int(step)

    def _stop(self) -> None:
        if self._inner is not None:
            self._inner.close()
            self._inner = None

    def _get_next_index(self) -> int:
        return self._step

    def _set_next_index(self, index: int) -> None:
        self.set_state({_STEP: index})

    def __str__(self) -> str:
        return f"PipelineIterator(next_step={self._step})"


class _Steps(grain.MapDataset[Element]):
    """Batches from `start` on, as Grain indexes them: past the end it begins again."""

    def __init__(self, pipeline: Pipeline, start: int) -> None:
        super().__init__()
        self._pipeline, self._start = pipeline, start
        self._length = len(pipeline) - start

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        return self._pipeline[self._start + index % self._length]

    def __str__(self) -> str:
        return f"GrainSftSteps(start={self._start})"


class _StepSource(grain.sources.RandomAccessDataSource[Element]):
    """A pipeline as a data source: record k is the batch of step k."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __len__(self) -> int:
        return len(self._pipeline)

    def __getitem__(self, step: int) -> Element:
        return self._pipeline[step]

    def __repr__(self) -> str:
        return repr(self._pipeline)


class _StepSampler:
    """Steps from `start` on, one after the other."""

    def __init__(self, pipeline: Pipeline, start: int) -> None:
        if not 0 <= start <= len(pipeline):
            raise RowIndexError(f"step {start}: expected 0 to {len(pipeline)}.")
        self._start, self._length = start, len(pipeline) - start
        self._shard_options = grain.sharding.NoSharding()

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
        iterator: Iterator[Element] = super().__iter__()
        if self.multiprocessing_options.num_workers:
            workers.start(iterator)
        return iterator


def _state_key(pipeline: Pipeline) -> str:
    """What decides the global batches: all but the host, so that a run may go on with another number of hosts."""
    sampler = pipeline.sampler
    return repr(pipeline).replace(f"host={sampler.host!r}, ", "") if sampler.order != "maxtext" else repr(pipeline)
