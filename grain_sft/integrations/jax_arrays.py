"""Iterator over a pipeline's batches as global `jax.Array`s, for any mesh and sharding."""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Sharding

from grain_sft.arguments import MOST_AHEAD, as_integer, check_type
from grain_sft.errors import PipelineError
from grain_sft.integrations.checkpoint import Stateful
from grain_sft.integrations.context_order import ContextOrder
from grain_sft.integrations.placement import Block, GlobalBatch, Placement, ProcessRows, placement_of, process_rows
from grain_sft.pipeline import Pipeline, ReadAhead, StepIterator, checked_step, make_batch, takes_loss
from grain_sft.source import Element
from grain_sft.transforms import trait
from grain_sft.types import Ints

__all__ = ["Block", "GlobalBatch", "GlobalBatches", "ProcessRows", "process_rows"]


class GlobalBatches(Stateful, StepIterator[GlobalBatch]):
    """Iterator over a pipeline's batches as global arrays. Every process creates an iterator and requests the same batches.

    Slot g of the global batch is row g of the global array, for any sharding. A process reads only the rows and columns that
    the sharding puts on its devices. It reads whole rows if `loaders` is given, or if the pipeline's layout or transforms need
    whole rows (`Pipeline.reads_columns` is False).

    Threads transfer the next batches while the trainer computes a step. The state is the same for any number of processes.

    Args:
      pipeline: Pipeline of `Host(0, 1)`, as `load(config, host=Host(0, 1))` returns it.
      sharding: Sharding of the arrays [rows, L].
      start_step: Step of the first batch.
      num_rows: Number of rows of the global arrays, at least the global batch size. Rows after those of the batch are 0 and
        take no loss. None means the global batch size.
      loaders: Indices of the processes that can read the data. They read the batch, and a collective distributes each array.
        None means that all processes read.
      ahead: Number of batches that are transferred in advance. 0 makes each batch when it is requested.
      threads: Number of threads that read and transfer in advance.
      allow_other_data: Whether `set_state` accepts the state of a run on other data.
      prepare: Function that may change the arrays before they go to the devices. Its arguments are the step, a block of the
        batch that this process read, and the block's arrays [n, columns]. It returns arrays of the same shape. Threads call it.
      load_balanced_shards: Number of shards of MaxText's load-balanced order (`ContextOrder`). 1 means the natural order.

    Raises:
      PipelineError: The pipeline is for one host of several, the sharding or the load-balanced order can't divide the arrays,
        the `loaders` have no device, or a transform cuts each batch to a length of its own.
      RowIndexError: The pipeline does not have the start step.
      WrongTypeError: `sharding` is not a `Sharding`.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sharding: Sharding,
        *,
        start_step: int = 0,
        num_rows: int | None = None,
        loaders: Sequence[int] | None = None,
        ahead: int = 2,
        threads: int = 2,
        allow_other_data: bool = False,
        prepare: Callable[[int, Block, Element], Element] | None = None,
        load_balanced_shards: int = 1,
    ) -> None:
        host = pipeline.sampler.host
        if host.count != 1:
            problem = f"the pipeline is for {host!r}, but the sharding decides which rows a process reads"
            raise PipelineError(f"{problem}. Load it with host=Host(0, 1).")
        check_type("GlobalBatches: sharding", sharding, Sharding, "NamedSharding(mesh, PartitionSpec(...)) or another")
        self.sharding = sharding
        self._prefetch = as_integer("ahead", ahead, 0, PipelineError, MOST_AHEAD)
        self._threads = as_integer("threads", threads, 1, PipelineError, MOST_AHEAD)
        self._allow_other_data, self._prepare = allow_other_data, prepare
        order = ContextOrder(load_balanced_shards)
        self._placements: dict[tuple[int, int], dict[int, Placement]] = {}
        """Placements by (first step of a stage, number of rows of a batch), and then by number of columns, ascending."""
        for stage in pipeline.stages:
            shapes = sorted(_shapes(stage))
            # Whether each process reads only the columns on its devices. Arrays of different widths, such as prompts and
            # responses, have no columns in common.
            divides = stage.reads_columns and len({width for _, width in shapes}) == 1
            for batch_rows, width in shapes:
                rows = batch_rows if num_rows is None else as_integer("num_rows", num_rows, 1, PipelineError)
                if rows < batch_rows:
                    raise PipelineError(f"num_rows={rows}: the global batch alone has {batch_rows} rows. Give more.")
                order.check(width)
                placement = placement_of(sharding, (rows, width), batch_rows, order, divides, loaders)
                self._placements.setdefault((stage.first_step, batch_rows), {})[width] = placement
        self._makes_ahead = self._prefetch > 0
        super().__init__(pipeline, start_step)

    def _placements_at(self, step: int) -> dict[int, Placement]:
        return self._placements[self.pipeline.at(step).first_step, self.pipeline.sampler.batch_sizes.at(step)]

    def _placement(self, step: int, width: int | None = None) -> Placement:
        """Return the placement of arrays of `step` with `width` columns; None means the widest."""
        by_width = self._placements_at(step)
        return by_width[width or max(by_width)]

    def rows(self, step: int) -> Ints:
        """Return the slots of the global batch of `step` that this process reads, whole or in part: int64 [n]."""
        return self._placement(step).reads

    def blocks(self, step: int) -> list[Block]:
        """Return the rows and columns of the global batch of `step` that this process reads."""
        return self._placement(step).blocks

    def _make(self, step: int) -> GlobalBatch:
        batch = super()._make(step) if self._makes_ahead else self._make_now(step)
        return {key: self._placement(step, array.shape[1]).finish(array) for key, array in batch.items()}

    def _reader_from(self, step: int) -> ReadAhead[GlobalBatch]:
        this = weakref.proxy(self)  # otherwise, threads that wait for work would keep the iterator alive
        make, name = (lambda step: this._make_now(step)), "grain_sft-global-batches"
        return ReadAhead(make, start=step, end=self._end, ahead=self._prefetch, threads=self._threads, name=name)

    def _is_writer(self, step: int) -> bool:
        """Return whether this process writes the files of observers for all processes."""
        return self._placement(step).writer == jax.process_index()

    def _make_now(self, step: int) -> GlobalBatch:
        """Read this process's blocks of the batch of `step`, and begin their transfer to its devices."""
        blocks = self.blocks(step)

        def read(step: int) -> list[Element]:
            return [self.pipeline.read(step, block.rows, columns=block.columns) for block in blocks]

        batches = make_batch(self.pipeline, step, read)
        if self.pipeline.first_steps.left:  # number of batches that are still to check
            self._check_loss(step, batches)
        batches = [self._prepared(step, block, batch) for block, batch in zip(blocks, batches, strict=True)]
        global_batch = {}
        for key, array in batches[0].items():
            # a block of some columns is narrower than the global array; then all arrays have one width, and None means it
            width = array.shape[1] if blocks[0].columns is None else None
            global_batch[key] = self._placement(step, width).put([batch[key] for batch in batches])
        return global_batch

    def _prepared(self, step: int, block: Block, batch: Element) -> Element:
        """Return the arrays of `batch`, changed by `prepare`. Check their shapes."""
        prepared = batch if self._prepare is None else self._prepare(step, block, batch)
        first, end = block.columns or (0, 0)
        widths = self._placements_at(step) if block.columns is None else (end - first,)
        check_type(f"the batch of step {step}", prepared, Mapping, "a dict of arrays")
        for key, array in prepared.items():
            check_type(f"{key!r} of step {step}", array, np.ndarray | jax.Array, "an array")
            if array.ndim != 2 or len(array) != len(block.rows) or array.shape[1] not in widths:
                expected = f"has shape {list(array.shape)}; expected {[len(block.rows), max(widths)]}"
                fix = f"Remove the transform that changes it ({self.pipeline.at(step).transforms!r}), or correct `prepare`"
                raise PipelineError(f"{key!r} of step {step} {expected}. {fix}.")
        return prepared

    def _check_loss(self, step: int, batches: Sequence[Element]) -> None:
        """Give the batch to `first_steps`, which warns if no target of the first batches takes loss."""
        # `takes_loss` returns None if the keys of a batch do not state it
        batch = next((batch for batch in batches if takes_loss(batch) is not False), batches[0])
        if takes_loss(batch) is False and self.blocks(step)[0].columns is not None:  # other columns may take loss
            batch = self.pipeline.read(step, self.rows(step))
        self.pipeline.first_steps.check(self.pipeline, step, batch)

    def reset(self) -> None:
        """Continue at step 0."""
        self.seek(0)

    def seek(self, step: int) -> None:
        """Continue at `step`. Raise a RowIndexError if the pipeline does not have this step."""
        step = checked_step(self.pipeline, step)
        with self._lock:
            if step != self.next_step:
                self._go_to(step)


def _shapes(stage: Pipeline) -> Iterable[tuple[int, int]]:
    """Return the different shapes (rows, columns) of the arrays in a stage's batches."""
    layout, sizes = stage.source.layout, set(stage.sampler.batch_sizes.sizes)
    if any(trait(each, "trims_columns") for each in stage.transforms):
        raise PipelineError(f"a transform cuts each batch to a length of its own: {stage.transforms!r}. Remove it.")
    cuts = any(trait(each, "splits_rows") or trait(each, "cuts_columns") for each in stage.transforms)
    if layout.row_lengths:
        if cuts:
            reason = f"a transform changes their columns ({stage.transforms!r})"
            raise PipelineError(f"the rows have several lengths, and {reason}. Remove it.")
        # every batch has the same number of tokens, so the batch with the most rows has the shortest rows
        return zip(sorted(sizes, reverse=True), layout.row_lengths, strict=True)
    widths = set(row_widths(stage).values()) if cuts else {layout.sequence_length}
    return itertools.product(sizes, widths)


def row_widths(stage: Pipeline) -> dict[str, int]:
    """Return the row length of each two-dimensional array of a stage's batches, by key."""
    batch = stage.read(stage.first_step, np.zeros(0, np.int64))  # a batch without rows has the same widths
    return {key: np.shape(array)[1] for key, array in batch.items() if np.ndim(array) > 1}
