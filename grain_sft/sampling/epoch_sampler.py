"""EpochSampler: the rows of a sampler with one stream, from its epochs and its order."""

import functools

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling.epochs import RunningEpochs
from grain_sft.sampling.orders import Ints, RowsAt
from grain_sft.sampling.stream_sampler import StreamSampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder


class EpochSampler(StreamSampler):
    """A sampler with one stream of rows.

    A block is the part of an epoch that is one sequence of rows: the whole epoch or, with `host_blocks`, the part of one host.
    """

    def _set_stream(
        self, source: SourceOrder, epochs: RunningEpochs, block_rows: int, rows_at: RowsAt, batching: str = ""
    ) -> None:
        """Set the stream: its source, the epochs of a block, the rows of a block, the function that maps an epoch and indices
        in its order to rows, and `batching` as in `EpochStream`."""
        self.epochs, self.start = source.epochs, source.start
        self._epochs, self._block_rows, self._rows_at = epochs, block_rows, rows_at
        self.streams = (EpochStream("", source, 0, self._begin, self._span, rows_at, self._blocks, batching),)

    @property
    def _blocks(self) -> int:
        return self.host.count if self.host_blocks else 1

    @functools.cached_property
    def steps_per_epoch(self) -> int:
        """Number of steps in the first whole epoch, rounded down where steps straddle epochs."""
        epoch = self.start[0] + (self.start[1] > 0)
        return self._epochs.steps_before(epoch + 1) - self._epochs.steps_before(epoch)

    @functools.cached_property
    def num_steps(self) -> int | None:
        """Number of steps; None means no end. Steps that straddle epochs can be more than `epochs * steps_per_epoch`."""
        return None if self.epochs is None else self._epochs.steps_before(self.epochs)

    def steps_of_epochs(self, epochs: int | None) -> int:
        return self._epochs.steps_before(self._checked_epochs(epochs) or self.epochs or self.start[0] + 1)

    def _rows(self, step: int, indices: Ints) -> Ints:
        epoch, first = self._epochs.begin(step)
        indices = indices + first
        start = self.host.index * self._block_rows if self.host_blocks else 0
        if not len(indices) or indices.max() < self._block_rows:
            return self._rows_at(epoch, indices + start if start else indices)
        return self._read_blocks(np.full(len(indices), epoch), indices, start)[2]

    def _read_blocks(self, epoch: Ints, index: Ints, start: Ints | int) -> tuple[Ints, Ints, Ints]:
        """Return the epoch, the index in its order, and the row (`FILL_ROW` past its end) of each `index`, which counts
        rows of a block from the beginning of `epoch`; `start` is the block's first index in the order."""
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
        sizes = self.batch_sizes.begins(step)[1]
        slot = slot + block * (sizes // self._blocks)
        step = np.where(block < self._blocks, step, -1)  # no host reads the rows after the last block
        return step, slot, self._hosts(slot, sizes)
