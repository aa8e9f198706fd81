"""A pipeline's batches as global `jax.Array`s, on any mesh and sharding."""

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Sharding

from grain_sft.arguments import as_integer
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import Stateful
from grain_sft.integrations.context_order import ContextOrder
from grain_sft.integrations.placement import (
    Block,
    DirectPlacement,
    GlobalBatch,
    LoaderPlacement,
    Placement,
    process_rows,
)
from grain_sft.integrations.placement import ProcessRows as ProcessRows
from grain_sft.pipeline import Pipeline, ReadAhead, StepIterator, checked_step, takes_loss
from grain_sft.source import Element
from grain_sft.storage import activity
from grain_sft.transforms import trait

AHEAD = 2  # batches whose transfer to the devices begins in advance
THREADS = 2

__all__ = ["Block", "GlobalBatch", "GlobalBatches", "ProcessRows", "process_rows"]


class GlobalBatches(Stateful, StepIterator[GlobalBatch]):
    """Iterator of a pipeline's batches as global arrays. Every process makes one, and takes from it in step.

    Row g of the global batch is at index g of the global array, whatever the number of processes and the sharding. A process
    reads what its devices have of the batch, according to the sharding: rows, and of these the columns, if the mesh divides
    the sequence. It has no host index. Several processes read the same where their devices have the same (a mesh axis that
    divides the model), and whole rows where a transform needs these (`Pipeline.reads_columns`).

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
      prepare: Function of a step, a block of its batch that this process read, and the block's arrays [n, L], that returns what
        goes to the devices. Called in threads.
      load_balanced_shards: Number of shards of MaxText's load-balanced order, in which the columns of the global arrays are
        then; 1 leaves them in their natural order. See `ContextOrder`.

    Raises:
      PipelineError: a pipeline of one host of many, arrays that the sharding or the load-balanced order can't divide, or no
        loaders.
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
        prepare: Callable[[int, Block, Element], Element] | None = None,
        load_balanced_shards: int = 1,
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
        order = ContextOrder(load_balanced_shards)

        @functools.cache
        def placement(batch_rows: int, width: int, divides: bool) -> Placement:
            rows = batch_rows if num_rows is None else as_integer("num_rows", num_rows, 1, PipelineError)
            if rows < batch_rows:
                raise PipelineError(f"num_rows={rows}: the global batch alone has {batch_rows} rows.")
            order.check(width)
            if loaders is None:
                return DirectPlacement(sharding, (rows, width), batch_rows, order, divides=divides)
            return LoaderPlacement(sharding, (rows, width), batch_rows, order, loaders=loaders)

        self._placements: dict[tuple[int, int], dict[int, Placement]] = {}
        """Placements by the columns of the array, ascending; by the first step of the stage and the rows of the batch."""
        for stage in pipeline.stages:
            shapes = sorted(_shapes(stage))
            divides = stage.reads_columns and len({width for _, width in shapes}) == 1
            for batch_rows, width in shapes:
                of_stage = self._placements.setdefault((stage.first_step, batch_rows), {})
                of_stage[width] = placement(batch_rows, width, divides)
        self._makes_ahead = self._prefetch > 0
        super().__init__(pipeline, start_step)

    def _placements_at(self, step: int) -> dict[int, Placement]:
        """Return the placements of the arrays of a step, by their columns."""
        return self._placements[self.pipeline.at(step).first_step, self.pipeline.sampler.batch_sizes.at(step)]

    def _placement(self, step: int, width: int | None = None) -> Placement:
        """Return the placement of arrays of a step; `width` None means any, for what does not depend on it."""
        found = self._placements_at(step)
        return found[width or max(found)]

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        """Return the slots of the global batch of `step` that this process reads, at least in part: int64 [n]."""
        return self._placement(step).reads

    def blocks(self, step: int) -> list[Block]:
        """Return the rows and columns of the global batch of `step` that this process reads."""
        return self._placement(step).blocks

    def _make(self, step: int) -> GlobalBatch:
        batch = super()._make(step)
        return {key: self._placement(step, array.shape[1]).finish(array) for key, array in batch.items()}

    def _reader(self, step: int) -> ReadAhead[GlobalBatch]:
        this = weakref.proxy(self)  # threads that wait for work must not keep the iterator alive
        make, name = (lambda step: this._make_now(step)), "grain_sft-global-batches"
        return ReadAhead(make, start=step, end=self._end, ahead=self._prefetch, threads=self._threads, name=name)

    def _writer(self, step: int) -> bool:
        return self._placement(step).writer == jax.process_index()

    def _make_now(self, step: int) -> GlobalBatch:
        """Return the batch of `step`, whose transfer to this process's devices has begun."""
        blocks = self.blocks(step)
        with activity.making_batch(self.pipeline, step):
            read = [self.pipeline.read(step, block.rows, columns=block.columns) for block in blocks]
        if self.pipeline.first_steps.left:
            self._check_loss(step, read)
        parts = [self._prepared(step, block, batch) for block, batch in zip(blocks, read, strict=True)]
        placed = {}
        for key, array in parts[0].items():
            width = array.shape[1] if blocks[0].columns is None else None
            placed[key] = self._placement(step, width).put([part[key] for part in parts])
        return placed

    def _prepared(self, step: int, block: Block, batch: Element) -> Element:
        """Return what goes to the devices of a block of the batch of `step`."""
        widths = self._placements_at(step)
        for key, array in batch.items():
            if len(array) != len(block.rows) or (block.columns is None and array.shape[1] not in widths):
                raise PipelineError(
                    f"{key!r} of step {step} is {list(array.shape)}, but rows over many devices are of one shape, "
                    f"{[len(block.rows), max(widths)]} here: take out the transform that "
                    f"cuts columns off ({self.pipeline.transforms!r})."
                )
        return batch if self._prepare is None else self._prepare(step, block, batch)

    def _check_loss(self, step: int, read: Sequence[Element]) -> None:
        """Check that targets of a first step take loss: those of whole rows, if none of the columns that were read does."""
        checked = next((batch for batch in read if takes_loss(batch) is not False), read[0])
        if takes_loss(checked) is False and self.blocks(step)[0].columns is not None:
            checked = self.pipeline.read(step, self.rows(step))
        self.pipeline.first_steps.check(self.pipeline, step, checked)

    def reset(self) -> None:
        """Continue at step 0."""
        self.seek(0)

    def seek(self, step: int) -> None:
        """Continue at `step`. Raise a RowIndexError where the pipeline does not have it."""
        step = checked_step(self.pipeline, step)
        with self._lock:
            if step != self.next_step:
                self._go_to(step)


def _shapes(stage: Pipeline) -> Iterator[tuple[int, int]]:
    """Yield the rows and columns of the arrays of a stage's batches."""
    layout, sizes = stage.source.layout, set(stage.sampler.batch_sizes.sizes)
    cuts = any(trait(each, "splits_rows") or trait(each, "cuts_columns") for each in stage.transforms)
    if layout.row_lengths:
        if cuts:
            found = f"rows of several lengths, and a transform that changes their columns ({stage.transforms!r})"
            raise PipelineError(f"{found}: take it out.")
        yield from zip(sorted(sizes, reverse=True), layout.row_lengths, strict=True)
        return
    widths = {layout.sequence_length}
    if cuts and stage.end_step:
        widths = {array.shape[1] for array in stage.read(stage.first_step, np.zeros(0, np.int64)).values()}
    yield from itertools.product(sizes, widths)
