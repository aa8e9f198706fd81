"""Sampler of one source of rows, such as one corpus."""

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Literal, Self, get_args

import msgspec
import numpy as np

from grain_sft.arguments import check_choice
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.epoch_sampler import EpochSampler
from grain_sft.sampling.epochs import EndingEpochs, RunningEpochs
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import ORDERS, CacheDir, Costs
from grain_sft.sampling.streams import SourceOrder
from grain_sft.types import Ints

LastBatch = Literal["drop", "fill", "run_on"]


class IndexSampler(EpochSampler):
    """Rows of every step, as a pure function of (seed, step, host).

    Each epoch has its own permutation of the rows. Host h of H reads slots h, h + H, h + 2H, ... of the global batch, which
    does not depend on H. In orders with `host_blocks`, such as `maxtext`, host h reads the h-th of H blocks of each
    permutation. In these orders, the global batch depends on H. docs/guide.md ("Orders") describes the orders.

    Args:
      num_instances: Number of rows.
      global_batch_size: Number of rows of a step, of all hosts together.
      seed: Seed of the order, 0 or more.
      order: Order of the rows in an epoch. `olmo`, `maxtext`, `openchat` and `grain` equal the orders of OLMo-core, MaxText,
        OpenChat and Grain. `episode` is `RandomState(seed + epoch).permutation` of numpy. `random` draws with replacement. In
        `balanced`, the rows of a step have similar costs of attention. `package.module:Name` is an order of yours.
      host: Index of this host, and the number of hosts.
      shuffle: Whether rows are shuffled. `false` reads them in ascending order. In order `maxtext`, each host reads its own
        block of the rows, also with `false`.
      epochs: Number of epochs after which the run ends. Without it, the run never ends.
      last_batch: Use of the last rows of an epoch if they do not fill a step. `drop` leaves them out, `fill` fills the step
        with rows that take no loss, and `run_on` fills it with rows of the next epoch. Orders `maxtext`, `grain` and `random`
        always run on.
      schedule: Pairs (step, global_batch_size): number of rows of each step from that step on. An epoch still has each row
        once.
      costs: Function that returns the cost of each row, int64 [num_instances], such as `layout.row_costs`. Orders by cost, such
        as `balanced`, need it.
      chunk_size: Number of consecutive rows that stay together, as with `chunk_size` of OLMo-core's data loader.
      start: Pair (epoch, index) of the row at which this sampler begins: an epoch, and an index in its order. It is (0, 0)
        unless an earlier stage of the run read rows. In order `maxtext`, the index is a multiple of the number of hosts.
      cache_dir: Folder of the files of orders such as `olmo`; None means $GRAIN_SFT_CACHE_DIR/orders, or the user's cache.

    Raises:
      SamplerError: An argument is out of bounds, or contradicts another argument.
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
        cache_dir: CacheDir = None,
    ) -> None:
        source = SourceOrder(num_instances, seed, order, shuffle, epochs, chunk_size=chunk_size, start=start)
        self.order, self.last_batch, self.cache_dir = order, last_batch, cache_dir
        self.chunk_size, self.costs = source.chunk_size, costs
        check_choice("last_batch", last_batch, get_args(LastBatch), SamplerError)
        traits = ORDERS[order]
        super().__init__(BatchSizes(global_batch_size, schedule), host)
        if last_batch == "fill" and traits.runs_on:
            problem = f"last_batch='fill': order {order!r} runs on across epochs and has no last batch"
            raise SamplerError(f"{problem}. Leave last_batch out, or take another order.")
        self.runs_on, self.host_blocks = traits.runs_on or last_batch == "run_on", traits.host_blocks
        start = source.start
        if traits.by_cost and (start[1] or self.chunk_size > 1):
            problem = f"order {order!r} arranges the rows of whole epochs one by one"
            fix = "Start at index 0 (an earlier stage has to read whole epochs) with chunk_size=1, or take another order."
            raise SamplerError(f"start={start}, chunk_size={self.chunk_size}: {problem}. {fix}")
        # The number of hosts with `host_blocks`, else 1. All blocks are cut into steps alike, so one block is computed.
        num_blocks = self._num_blocks
        block_rows = source.num_instances // num_blocks
        most = max(self.batch_sizes.sizes)
        self.batch_sizes.check_from(0, num_blocks)
        if start[1] % num_blocks:  # rounding down would repeat rows
            problem = f"start={start}: all {num_blocks} hosts begin at the same index of their blocks"
            raise SamplerError(f"{problem}. Take an index that is a multiple of {num_blocks}, or end the earlier stage there.")
        if self.host_blocks and (rows_read := block_rows * num_blocks) < most:
            problem = f"global_batch_size={most} is more than the {rows_read} rows that an epoch reads"
            raise SamplerError(f"{problem}. Take a smaller batch.")
        schedule_of_block = [(step, size // num_blocks) for step, size in self.schedule]
        sizes_of_block = BatchSizes(self.global_batch_size // num_blocks, schedule_of_block)
        begin = start[0], start[1] // num_blocks
        if self.runs_on:
            epochs_of_block = RunningEpochs(block_rows, sizes_of_block, begin)
        else:
            epochs_of_block = EndingEpochs(block_rows, sizes_of_block, begin, fill=last_batch == "fill")
        costs_of_steps = None if costs is None else Costs(costs, epochs_of_block.cuts)
        # A later stage goes on in this stream only if its `batching` is equal. It counts chunks, because a stage with rows of
        # half the length has twice the rows and twice the `chunk_size`.
        batching = f"{num_blocks} blocks of {block_rows / self.chunk_size} chunks" if self.host_blocks else ""
        self._set_stream(source, epochs_of_block, source.rows_at(cache_dir, costs_of_steps), batching)
        if self.num_steps == 0:
            problem = f"global_batch_size={most} is more than the {source.num_rows} rows left in {epochs=}"
            raise SamplerError(f"{problem}. Take more epochs or a smaller batch.")

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Self:
        return self._with(start=starts.get("", (0, 0)))

    def _key(self, seed: int) -> str:
        hosts = f"host={Host(0, self.host.count)!r}, " if self.host_blocks else ""
        costs = f", costs={self._costs_hash}" if ORDERS[self.order].by_cost else ""
        return (
            f"IndexSampler(num_instances={self.num_instances}, global_batch_size={self.global_batch_size}, "
            f"seed={seed}, order={self.order!r}, {hosts}shuffle={self.shuffle}, "
            f"epochs={self.epochs}, last_batch={self.last_batch!r}{costs}"
            f"{self._schedule_text}{self.streams[0].source.options_text})"
        )

    @functools.cached_property
    def _costs_hash(self) -> str:
        assert self.costs is not None
        return hashlib.sha256(np.ascontiguousarray(self.costs(), "<i8").data).hexdigest()[:16]
