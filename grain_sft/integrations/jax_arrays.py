"""A pipeline's batches as global `jax.Array`s, on any mesh and sharding."""

import itertools
import weakref
from collections.abc import Callable, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import Stateful
from grain_sft.integrations.placement import DirectPlacement, GlobalBatch, LoaderPlacement, Placement, process_rows
from grain_sft.integrations.placement import ProcessRows as ProcessRows
from grain_sft.pipeline import Pipeline, ReadAhead, StepIterator, checked_step
from grain_sft.source import Element
from grain_sft.storage import activity
from grain_sft.transforms import trait

AHEAD = 2  # batches whose transfer to the devices has begun before they are asked for
THREADS = 2

__all__ = ["GlobalBatch", "GlobalBatches", "ProcessRows", "process_rows"]


class GlobalBatches(Stateful, StepIterator[GlobalBatch]):
    """Iterator of a pipeline's batches as global arrays. Every process makes one, and takes from it in step.

    Row g of the global batch is at index g of the global array, whatever the number of processes and the sharding. A process
    reads the rows that its devices have a part of, according to the sharding; it has no host index. Where devices of several
    processes have the same rows (a mesh axis that divides the model, or the sequence), each of these processes reads them.

    Threads begin the transfer of the next batches to the devices before they are asked for, so that a training step hides it.
    The state is a step and a receipt (`grain_sft.integrations.checkpoint`), the same for any number of processes.

    Args:
      pipeline: Pipeline of `Host(0, 1)`, as `load(config, host=Host(0, 1))` returns it. The sharding decides which rows this
        process reads.
      sharding: Sharding of the arrays [rows, L].
      start_step: Step of the first batch.
      num_rows: Rows of the global arrays, at least those of the global batch. The rows after it are 0, without loss, and a
        process that has no other rows reads nothing. None means as many as the global batch.
      loaders: Processes that can read the data, where not all can: they read the batch, and one collective a step spreads it.
        None means all.
      ahead: Number of batches whose transfer begins before they are asked for. 0 makes each batch when it is asked for.
      threads: Number of threads that read and transfer ahead.
      allow_other_data: Whether `set_state` accepts the state of a run on other data.
      prepare: Function of a step and what this process read of its batch, arrays [n, L], that returns what goes to the devices.
        Called in threads.

    Raises:
      PipelineError: a pipeline of one host of many, arrays that the sharding can't divide, or no loaders.
      RowIndexError: the pipeline does not have the start step.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sharding: Sharding,
        *,
        start_step: int = 0,
        num_rows: int | None = None,
        loaders: Sequence[int] | None = None,
        ahead: int = AHEAD,
        threads: int = THREADS,
        allow_other_data: bool = False,
        prepare: Callable[[int, Element], Element] | None = None,
    ) -> None:
        if pipeline.sampler.host.count != 1:
            raise PipelineError(
                f"the pipeline is that of {pipeline.sampler.host!r}, but the sharding decides which rows a process "
                "reads: load it with host=Host(0, 1)."
            )
        self.pipeline, self.sharding = pipeline, sharding
        self._prefetch = as_integer("ahead", ahead, 0, PipelineError)
        self._threads = as_integer("threads", threads, 1, PipelineError)
        self._allow_other_data, self._prepare = allow_other_data, prepare
        self._widths = {pipeline.source.layout.sequence_length}
        if pipeline.end_step and any(
            trait(each, "splits_rows") or trait(each, "cuts_columns") for each in pipeline.transforms
        ):
            self._widths = {array.shape[1] for array in pipeline.read(0, np.zeros(0, np.int64)).values()}
        self._placements: dict[tuple[int, int], Placement] = {}  # by the rows of the batch and the columns of the array
        for batch_rows, width in itertools.product(set(pipeline.sampler.batch_sizes.sizes), self._widths):
            rows = batch_rows if num_rows is None else as_integer("num_rows", num_rows, 1, PipelineError)
            if rows < batch_rows:
                raise PipelineError(f"num_rows={rows}: the global batch alone has {batch_rows} rows.")
            if loaders is None:
                self._placements[batch_rows, width] = DirectPlacement(sharding, (rows, width), batch_rows)
            else:
                self._placements[batch_rows, width] = LoaderPlacement(sharding, (rows, width), batch_rows, loaders)
        super().__init__(pipeline, start_step)

    def _placement(self, step: int, width: int | None = None) -> Placement:
        """Return the placement of arrays of a step; `width` None means any, for what does not depend on it."""
        return self._placements[self.pipeline.sampler.batch_sizes.at(step), width or max(self._widths)]

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Return the slots of the global batch of `step` that this process reads: int64 [n]."""
        return self._placement(step).reads

    def _make(self, step: int) -> GlobalBatch:
        batch = super()._make(step)
        return {key: self._placement(step, array.shape[1]).finish(array) for key, array in batch.items()}

    def _reader(self, step: int) -> ReadAhead[GlobalBatch] | None:
        if not self._prefetch:
            return None
        this = weakref.proxy(self)  # threads that wait for work must not keep the iterator alive
        make, name = (lambda step: this._make_now(step)), "grain_sft-global-batches"
        return ReadAhead(make, start=step, end=self._end, ahead=self._prefetch, threads=self._threads, name=name)

    def _writer(self, step: int) -> bool:
        return self._placement(step).writer == jax.process_index()

    def _make_now(self, step: int) -> GlobalBatch:
        """Return the batch of `step`, whose transfer to this process's devices has begun."""
        placement = self._placement(step)
        with activity.making_batch(self.pipeline, step):
            batch = self.pipeline.read(step, placement.reads)
        if self.pipeline.first_steps.left:
            self.pipeline.first_steps.check(self.pipeline, step, batch)
        for key, array in batch.items():
            if len(array) != len(placement.reads) or array.shape[1] not in self._widths:
                raise PipelineError(
                    f"{key!r} of step {step} is {list(array.shape)}, but rows over many devices are of one shape, "
                    f"{[len(placement.reads), max(self._widths)]} here: take out the transform that "
                    f"cuts columns off ({self.pipeline.transforms!r})."
                )
        if self._prepare is not None:
            batch = self._prepare(step, batch)
        return {key: self._placement(step, array.shape[1]).put(array) for key, array in batch.items()}

    def reset(self) -> None:
        """Continue at step 0."""
        self.seek(0)

    def seek(self, step: int) -> None:
        """Continue at `step`. Raise a RowIndexError where the pipeline does not have it."""
        step = checked_step(self.pipeline, step)
        with self._lock:
            if step != self.next_step:
                self._go_to(step)
