"""Base of the samplers that read one stream of rows: the epochs of one source, one after the other."""

import abc
import functools

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, groups
from grain_sft.sampling.epochs import RunningEpochs
from grain_sft.sampling.orders import RowsAt
from grain_sft.sampling.stream_sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder
from grain_sft.types import Ints


class EpochSampler(StreamSampler):
    """Base of the samplers that read one stream of rows.

    Each epoch's order is divided into blocks: one block, or with `host_blocks` a block for each host. All blocks are cut into
    steps in the same way, so one `RunningEpochs` serves all of them. Its indices count from the begin of a block. Of 1,000
    rows, host 1 of 4 reads the block of indices 250 to 499, and index 3 of its block is index 253 of the order.
    """

    def _set_stream(self, source: SourceOrder, epochs: RunningEpochs, rows_at: RowsAt, batching: str = "") -> None:
        """Set the stream of the sampler, with arguments as in `EpochStream`. `epochs` are the epochs of one block."""
        self.num_instances, self.seed, self.shuffle = source.num_instances, source.seed, source.shuffle
        self.epochs, self.start = source.epochs, source.start
        self._epochs, self._block_rows, self._rows_at = epochs, epochs.num_rows, rows_at
        self.streams = (EpochStream("", source, 0, self._begin, self._span, rows_at, self._num_blocks, batching),)

    @property
    def _num_blocks(self) -> int:
        return self.host.count if self.host_blocks else 1

    @abc.abstractmethod
    def _key(self, seed: int) -> str:
        """Return `data_key`, but with `seed` in place of the sampler's seed."""

    @property
    def data_key(self) -> str:
        return self._key(self.seed)

    @property
    def receipt(self) -> str:
        return self._key(self.seed if self.streams[0].source.seeded else 0)

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps that end in the first whole epoch. An epoch inside which the run starts is not whole."""
        epoch = self.start[0] if self.start[1] == 0 else self.start[0] + 1
        return self._epochs.steps_before(epoch + 1) - self._epochs.steps_before(epoch)

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None if the run never ends.

        The number may differ from `epochs * steps_per_epoch`: with `runs_on`, a step may have rows of two epochs.
        """
        return None if self.epochs is None else self._epochs.steps_before(self.epochs)

    def steps_of_epochs(self, epochs: int | None) -> int:
        return self._epochs.steps_before(self._checked_epochs(epochs) or self.epochs or self.start[0] + 1)

    def _rows(self, step: int, indices: Ints) -> Ints:
        epoch, begin = self._epochs.begin(step)
        block_start = self.host.index * self._block_rows if self.host_blocks else 0
        order_indices = indices + (block_start + begin)
        if order_indices.max(initial=0) < block_start + self._block_rows:  # all rows are of one epoch
            return self._rows_at(epoch, order_indices)
        _, _, rows = self._read_block(np.full(len(indices), epoch), indices + begin, block_start)
        return rows

    def _read_block(self, epoch: Ints, index: Ints, block_start: Ints | int) -> tuple[Ints, Ints, Ints]:
        """Map indices in a block to their epochs, their indices in the epochs' orders, and their rows: int64 [n] each.

        With `runs_on`, an index may be in a later epoch: with blocks of 10 rows, index 12 of epoch 0 is index 2 of epoch 1.
        Without `runs_on`, an index past the end of its epoch has the row `FILL_ROW`. `block_start` is the index in the epoch's
        order at which the block begins: int64 [n], or one number for all indices.
        """
        if self.runs_on:
            later_epochs, index = np.divmod(index, self._block_rows)
            epoch = epoch + later_epochs
        rows = np.full(len(index), FILL_ROW, np.int64)
        order_index = index + block_start
        for number, selected in groups(epoch):
            selected = selected[index[selected] < self._block_rows]
            rows[selected] = self._rows_at(number, order_index[selected])
        return epoch, order_index, rows

    def _steps_of_one_size(self, step: int, size: int) -> int:
        count = super()._steps_of_one_size(step, size)
        if self.runs_on:
            return count
        rows_left = self._block_rows - self._epochs.begin(step)[1]
        return min(count, rows_left // (size // self._num_blocks))  # without the last, partial step of the epoch

    def _begin(self, step: int) -> tuple[int, int]:
        epoch, rows = self._epochs.begin(as_integer("step", step, 0, RowIndexError))
        return epoch, rows * self._num_blocks  # `rows` are rows of one block

    def _span(self, epoch: int) -> EpochSpan | None:
        span = self._epochs.span(epoch, self.num_steps)
        return None if span is None else span._replace(rows=span.rows * self._num_blocks)

    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        epochs, begins = self._epochs.begins(steps)
        block = host if self.host_blocks else np.zeros_like(host)
        slots_per_block = self.batch_sizes.of_steps(steps).size // self._num_blocks
        # the batch has the slots of block 0 first, then the slots of block 1, and so on
        index = begins[which] + slot - block * slots_per_block[which]
        columns = self._read_block(epochs[which], index, block * self._block_rows)
        return BatchSlots(steps[which], slot, host, np.zeros_like(slot), *columns)

    def _find(self, number: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        block, index = indices // self._block_rows, indices % self._block_rows
        step, slot_of_block = self._epochs.find(epoch, index)
        sizes = self.batch_sizes.of_steps(step).size
        slot = slot_of_block + block * (sizes // self._num_blocks)
        step = np.where(block < self._num_blocks, step, -1)  # no host reads the rows after the last block
        return step, slot, self._hosts(slot, sizes)
