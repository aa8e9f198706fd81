"""Epochs: which steps read which rows of each epoch, for batches whose size may change."""

import functools
import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.streams import EpochSpan


class RunningEpochs:
    """Epochs of `num_rows` rows each that follow one another without a gap, so that a step may have rows of two.

    Step 0 begins at `start`, an epoch and an index in it.
    """

    def __init__(self, num_rows: int, sizes: BatchSizes, start: tuple[int, int] = (0, 0)) -> None:
        self._num_rows, self._sizes = num_rows, sizes
        self._before = start[0] * num_rows + start[1]  # rows of all epochs before step 0

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch of the first row of `step`, and the index of that row in the epoch."""
        return divmod(self._sizes.before(step) + self._before, self._num_rows)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return the results of `begin` for many steps: int64 [n] each."""
        return np.divmod(self._sizes.begins(steps)[0] + self._before, self._num_rows)

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps whose rows are all in the epochs before `epoch`."""
        return self._sizes.step_of(max(0, epoch * self._num_rows - self._before))

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        """Return the steps that read an epoch in a run of `num_steps` (None: a run without end); None if no step does."""
        begin = epoch * self._num_rows - self._before  # counted from step 0
        first, end = max(0, begin), begin + self._num_rows
        if num_steps is not None:
            end = min(end, self._sizes.before(num_steps))
        if end <= first:
            return None
        return EpochSpan(self._sizes.step_of(first), self._sizes.step_of(end - 1), end - first, first - begin)

    def cuts(self, epoch: int) -> Ints:
        """Return the index in an epoch at which each of its steps begins, then the end of the last: int64 [steps + 1].

        A step that begins in an earlier epoch counts from index 0. The run has to begin with an epoch."""
        first = epoch * self._num_rows - self._before
        end = first + self._num_rows
        steps = np.arange(self._sizes.step_of(first), self._sizes.step_of(end - 1) + 1)
        return np.append(np.maximum(self._sizes.begins(steps)[0], first), end) - first

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        """Return the step that reads each of `indices` of an epoch, -1 where none does, and the slot there: int64 [n] each."""
        rows = indices + (epoch * self._num_rows - self._before)
        steps = self._sizes.steps_of(np.maximum(rows, 0))
        return np.where(rows < 0, -1, steps), rows - self._sizes.begins(steps)[0]


class _Piece(NamedTuple):
    """Consecutive steps of one batch size.

    Attributes:
      step, epoch, start: First step, and the epoch and index at which it begins.
      steps_left: Number of steps in the rest of that epoch.
      steps_per_epoch: Number of steps in each later epoch.
    """

    step: int
    size: int
    epoch: int
    start: int
    steps_left: int
    steps_per_epoch: int

    def begin(self, step: int) -> tuple[int, int]:
        into = step - self.step
        if into < self.steps_left:
            return self.epoch, self.start + into * self.size
        epochs, into = divmod(into - self.steps_left, self.steps_per_epoch)
        return self.epoch + 1 + epochs, into * self.size

    def first_step(self, epoch: int) -> int:
        if epoch <= self.epoch:
            return self.step
        return self.step + self.steps_left + (epoch - self.epoch - 1) * self.steps_per_epoch


class EndingEpochs(RunningEpochs):
    """Epochs that each begin with a step. The rows of an epoch that don't make a full batch are dropped or, with `fill`, make a
    last batch that is filled up."""

    def __init__(self, num_rows: int, sizes: BatchSizes, start: tuple[int, int] = (0, 0), *, fill: bool) -> None:
        super().__init__(num_rows, sizes, start)
        self._pieces: list[_Piece] = []
        epoch, index = start
        for step, size in zip(sizes.steps, sizes.sizes, strict=True):
            if self._pieces:
                last = self._pieces[-1]
                epoch, index = last.begin(step - 1)
                index = min(num_rows, index + last.size)
            left, per_epoch = (-(-rows // size) if fill else rows // size for rows in (num_rows - index, num_rows))
            if not per_epoch:
                raise SamplerError(
                    f"global_batch_size={size} is more than the {num_rows} rows of an epoch, which has no full step. Take a "
                    "smaller batch, or last_batch='run_on' or 'fill'."
                )
            self._pieces.append(_Piece(step, size, epoch, index, left, per_epoch))

    def begin(self, step: int) -> tuple[int, int]:
        return self._pieces[bisect_right(self._sizes.steps, step) - 1].begin(step)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        epochs, indices = np.array([self.begin(step) for step in steps.tolist()], np.int64).reshape(-1, 2).T
        return epochs, indices

    def steps_before(self, epoch: int) -> int:
        ends = [*self._sizes.steps[1:], math.inf]
        firsts = ((piece.first_step(epoch), end) for piece, end in zip(self._pieces, ends, strict=True))
        return next(first for first, end in firsts if first < end)

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        first, last = self.steps_before(epoch), self.steps_before(epoch + 1) - 1
        if last < first or (num_steps is not None and first >= num_steps):
            return None
        begin = self.begin(first)[1]
        return EpochSpan(first, last, min(self._num_rows, self.begin(last)[1] + self._sizes.at(last)) - begin, begin)

    def cuts(self, epoch: int) -> Ints:
        return np.append(*self._steps_of(epoch)[1:])

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        first, starts, end = self._steps_of(epoch)
        at = np.searchsorted(starts, indices, side="right") - 1
        return np.where((at >= 0) & (indices < end), first + at, -1), indices - starts[at]

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def _steps_of(self, epoch: int) -> tuple[int, Ints, int]:
        """Return the first step of an epoch, the index at which each of its steps begins, and the number of rows read."""
        first, last, rows, start = self.span(epoch, None) or (0, 0, 0, 0)
        return first, self.begins(np.arange(first, last + 1))[1], start + rows
