"""IndexSampler: the rows that this host reads at each step."""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, Self, get_args

import msgspec
import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.epochs import EndingEpochs, RunningEpochs
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import ORDERS, Costs, Ints
from grain_sft.sampling.stream_sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder

LastBatch = Literal["drop", "fill", "run_on"]


class IndexSampler(StreamSampler):
    """Rows of every step, as a pure function of (seed, step, host).

    Host h of H reads slots h, h + H, h + 2H, ... of the global batch. The global batch does not depend on the hosts. An
    epoch has `num_instances // global_batch_size` steps and a permutation of its own. Without `epochs`, the run never
    ends. `sampler[i]` returns the same rows one by one, as Grain's samplers do. The sampler declares `NoSharding`: it
    divides the rows between hosts itself, and `grain.DataLoader` must not divide them again.

    The orders of `grain_sft.sampling.ORDERS` are described in docs/guide.md ("Orders"). In order `maxtext` alone, host h
    reads the h-th contiguous block of each permutation, so that batches depend on the number of hosts.

    Args:
      num_instances: Number of rows.
      global_batch_size: Rows of a step, of all hosts together.
      seed: Seed of the order, 0 or more.
      order: Order of the rows in an epoch. `olmo`, `maxtext`, `episode`, `openchat` and `grain` replay these systems; `random`
        draws with replacement; `balanced` makes each step of rows of similar cost of attention; `package.module:Name` is an
        order of yours.
      host: This host, and the number of hosts.
      shuffle: Whether rows are shuffled. `false` reads them by number, divided between hosts as in `order`.
      epochs: Epochs after which the pipeline ends. Without it, never.
      last_batch: At the end of an epoch, rows that do not fill a step: `drop` them, `fill` the step with rows that take no
        loss, or let the next epoch `run_on` in it. Orders `maxtext`, `grain` and `random` always run on.
      schedule: Pairs (step, global_batch_size): rows of each step from that step on. Rows go on where they were, so that
        an epoch still has each row once: it ends where the next batch, of whatever size, is not full ("drop"), where no
        row is left ("fill"), or anywhere ("run_on").
      costs: Function that returns the cost of each row, int64 [num_instances], for an order by cost: `layout.row_costs`.
      chunk_size: Number of consecutive rows that the order keeps together, as `chunk_size` of OLMo-core's data loader.
      start: Epoch and index in its order of the first row of step 0, where another stage of a run read the rows before.
      cache_dir: Folder of exact orders; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: Arguments that don't fit together.
    """

    def __init__(
        self,
        num_instances: int,
        *,
        global_batch_size: Annotated[int, msgspec.Meta(ge=1)],
        seed: Annotated[int, msgspec.Meta(ge=0)],
        order: Annotated[str, ORDERS] = "shuffle",
        host: Host = Host(0, 1),
        shuffle: bool = True,
        epochs: Annotated[int, msgspec.Meta(ge=1)] | None = None,
        last_batch: LastBatch = "drop",
        schedule: Iterable[tuple[int, int]] = (),
        costs: Callable[[], Ints] | None = None,
        chunk_size: Annotated[int, msgspec.Meta(ge=1)] = 1,
        start: tuple[int, int] = (0, 0),
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        source = SourceOrder(num_instances, seed, order, bool(shuffle), epochs, chunk_size=chunk_size, start=start)
        self.chunk_size, self.start = source.chunk_size, source.start
        self.num_instances, self.seed, self.epochs = source.num_instances, source.seed, source.epochs
        self.order, self.shuffle, self.last_batch, self.cache_dir = order, source.shuffle, last_batch, cache_dir
        if last_batch not in get_args(LastBatch):
            raise SamplerError(f"last_batch={last_batch!r}: expected one of {', '.join(get_args(LastBatch))}.")
        traits = ORDERS[order]
        super().__init__(global_batch_size, schedule, host, host_blocks=traits.host_blocks)
        if last_batch == "fill" and traits.runs_on:
            raise SamplerError(f"last_batch='fill': order {order!r} runs on across epochs and has no last batch.")
        self.runs_on = traits.runs_on or last_batch == "run_on"
        self._source, self.costs = source, costs
        # A block is the part of an epoch that one stream of rows reads: all of it or, with `host_blocks`, this host's part.
        self._blocks = host.count if self.host_blocks else 1
        self._block_rows = self.num_instances // self._blocks
        self._block_start = host.index * self._block_rows if self.host_blocks else 0
        sizes, most = self.batch_sizes.shared(self._blocks), max(self.batch_sizes.sizes)
        if self.host_blocks and self._block_rows * self._blocks < most:
            raise SamplerError(
                f"global_batch_size={most} is more than the {num_instances} rows of an epoch. Take a smaller batch."
            )
        rows, fill = self._block_rows, last_batch == "fill"
        begin = start[0], start[1] // self._blocks
        self._epochs = (
            RunningEpochs(rows, sizes, begin) if self.runs_on else EndingEpochs(rows, sizes, begin, fill=fill)
        )
        if start[1] and costs is not None:
            raise SamplerError(
                f"start={start}: order {order!r} composes whole epochs. Begin with an epoch, or take another order."
            )
        self._rows_at = source.rows_at(cache_dir, costs and Costs(costs, self._epochs.cuts))
        if self.num_steps == 0:
            raise SamplerError(f"global_batch_size={most} is more than the {num_instances} rows in epochs={epochs}.")
        self.streams = (EpochStream("", source, 0, self._begin, self._span, self._rows_at, self._blocks),)

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in the first whole epoch, rounded down where steps straddle epochs."""
        epoch = self.start[0] + (self.start[1] > 0)
        return self._epochs.steps_before(epoch + 1) - self._epochs.steps_before(epoch)

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None means no end. Steps that straddle epochs can be more than `epochs * steps_per_epoch`."""
        return None if self.epochs is None else self._epochs.steps_before(self.epochs)

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Self:
        return type(self)(**self.__getstate__() | {"start": starts.get("", (0, 0))})

    def steps_before(self, epoch: int) -> int:
        """Return the number of whole steps in the epochs before `epoch`."""
        return self._epochs.steps_before(as_integer("epoch", epoch, 0, SamplerError))

    def steps_of_epochs(self, epochs: int | None) -> int:
        return self._epochs.steps_before(self._checked_epochs(epochs) or self.epochs or 1)

    def _rows(self, step: int, indices: Ints) -> Ints:
        epoch, first = self._epochs.begin(step)
        indices = indices + first
        if not len(indices) or indices.max() < self._block_rows:
            return self._rows_at(epoch, indices + self._block_start if self._block_start else indices)
        return self._read_blocks(np.full(len(indices), epoch), indices, self._block_start)[2]

    def _read_blocks(self, epoch: Ints, index: Ints, start: Ints | int) -> tuple[Ints, Ints, Ints]:
        """Return the epoch, the index in its order, and the row (`FILL_ROW` past its end) of each `index` into a block.
        Indices count from the beginning of `epoch`; `start` is the block's first index in the order."""
        if self.runs_on:
            later, index = np.divmod(index, self._block_rows)
            epoch = epoch + later
        rows = np.full(len(index), FILL_ROW, np.int64)
        at = index + start
        for each in range(int(epoch.min()), int(epoch.max()) + 1) if len(epoch) else ():
            real = np.flatnonzero((epoch == each) & (index < self._block_rows))
            if len(real):
                rows[real] = self._rows_at(each, at[real])
        return epoch, at, rows

    def _steps_of_one_size(self, step: int, size: int) -> int:
        count = super()._steps_of_one_size(step, size)
        left = self._block_rows - self._epochs.begin(step)[1]
        return count if self.runs_on else min(count, left // (size // self._blocks))

    def epoch(self, step: int) -> int:
        """Return the epoch that `step` begins in, from 0."""
        return self._begin(step)[0]

    def _begin(self, step: int) -> tuple[int, int]:
        epoch, rows = self._epochs.begin(as_integer("step", step, 0, RowIndexError))
        return epoch, rows * self._blocks

    def _span(self, epoch: int) -> EpochSpan | None:
        span = self._epochs.span(epoch, self.num_steps)
        return span and span._replace(rows=span.rows * self._blocks)

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        epoch, index = (column[which] for column in self._epochs.begins(steps))
        block = host if self.host_blocks else np.zeros_like(host)
        index = index + slot - block * (self.batch_sizes.begins(steps)[1][which] // self._blocks)
        columns = self._read_blocks(epoch, index, block * self._block_rows)
        return BatchSlots(steps[which], slot, host, np.zeros_like(slot), *columns)

    def _find(self, source: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        block, index = indices // self._block_rows, indices % self._block_rows
        step, slot = self._epochs.find(epoch, index)
        slot = slot + block * (self.batch_sizes.begins(step)[1] // self._blocks)
        step = np.where(block < self._blocks, step, -1)  # no host reads the rows after the last block
        return step, slot, block if self.host_blocks else slot % self.host.count

    @property
    def data_key(self) -> str:
        return self._described(self.seed, self.host)

    @property
    def receipt(self) -> str:
        return self._described(self.seed if self._source.seeded else 0, Host(0, self.host.count))

    def _described(self, seed: int, host: Host) -> str:
        hosts = f"host={host!r}, " if self.host_blocks else ""
        costs = f", costs={self._costs_hash}" if ORDERS[self.order].by_cost else ""
        return (
            f"IndexSampler(num_instances={self.num_instances}, global_batch_size={self.global_batch_size}, "
            f"seed={seed}, order={self.order!r}, {hosts}shuffle={self.shuffle}, "
            f"epochs={self.epochs}, last_batch={self.last_batch!r}{costs}{self._schedule_text}{self._source.changes_text})"
        )

    @functools.cached_property
    def _costs_hash(self) -> str:
        assert self.costs is not None
        return hashlib.sha256(np.ascontiguousarray(self.costs(), "<i8").data).hexdigest()[:16]
