"""Epochs of one sequence of rows: which step reads which rows of which epoch."""

import functools
import math
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.streams import EpochSpan
from grain_sft.types import Ints


class RunningEpochs:
    """Epochs that follow one another without a gap, so that a step may have rows of two epochs.

    With epochs of 10 rows and batches of 4, step 2 reads rows 8 and 9 of epoch 0, then rows 0 and 1 of epoch 1.

    Args:
      num_rows: Number of rows of each epoch.
      sizes: Number of rows of each step.
      start: Epoch of the first row of step 0, and index of that row in the epoch.
    """

    def __init__(self, num_rows: int, sizes: BatchSizes, start: tuple[int, int] = (0, 0)) -> None:
        self.num_rows, self._sizes = num_rows, sizes
        self._rows_before_run = start[0] * num_rows + start[1]

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch of the first row of `step`, and the index of that row in the epoch."""
        return divmod(self._sizes.before(step) + self._rows_before_run, self.num_rows)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return `begin` of each of `steps`, as epochs and indices: int64 [n] each."""
        return np.divmod(self._sizes.of_steps(steps).before + self._rows_before_run, self.num_rows)

    def _first_row(self, epoch: int) -> int:
        """Return the number of rows from step 0 to the beginning of `epoch`; negative if `epoch` begins before step 0."""
        return epoch * self.num_rows - self._rows_before_run

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps that read no row of `epoch` or of a later epoch."""
        return self._sizes.step_of(max(0, self._first_row(epoch)))

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        """Return the span of an epoch in a run of `num_steps` (None: without end), or None if no step reads the epoch."""
        epoch_begin = self._first_row(epoch)
        begin = max(0, epoch_begin)
        end = epoch_begin + self.num_rows
        if num_steps is not None:
            end = min(end, self._sizes.before(num_steps))
        if end <= begin:
            return None
        return EpochSpan(self._sizes.step_of(begin), self._sizes.step_of(end - 1), end - begin, begin - epoch_begin)

    @functools.lru_cache(maxsize=1)  # noqa: B019
    def cuts(self, epoch: int) -> Ints:
        """Return the index in `epoch` at which each of its steps begins, then the index after the last row that a step reads.

        The result is int64 [steps + 1]. For a step that begins in an earlier epoch, the entry is 0.
        """
        span = self.span(epoch, None) or EpochSpan(0, -1, 0)  # if no step reads the epoch, the range below is empty
        epochs, begins = self.begins(np.arange(span.first, span.last + 1))
        return np.append(np.where(epochs < epoch, 0, begins), span.start + span.rows)

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        """Return the step and the slot that read each of `indices` of `epoch`: int64 [n] each.

        The step is -1 for an index that no step reads. The slot of such an index has no meaning.
        """
        rows = indices + self._first_row(epoch)  # numbers of rows from step 0 on; below 0 before the run
        steps = self._sizes.steps_of(np.maximum(rows, 0))
        return np.where(rows < 0, -1, steps), rows - self._sizes.of_steps(steps).before


class _Phase(NamedTuple):
    """Consecutive steps with one batch size. A phase may begin inside an epoch."""

    step: int  # first step of the phase
    size: int  # rows of each step
    epoch: int  # epoch in which the previous phase ended, or the run starts
    first_index: int  # index in `epoch` of the first row that earlier steps do not read; `num_rows` if they read all
    steps_left: int  # steps from `first_index` to the end of `epoch`
    steps_per_epoch: int  # steps in each later epoch

    def begin(self, step: int) -> tuple[int, int]:
        """See `RunningEpochs.begin`. `step` is not before the phase."""
        steps = step - self.step
        if steps < self.steps_left:
            return self.epoch, self.first_index + steps * self.size
        later_epochs, steps = divmod(steps - self.steps_left, self.steps_per_epoch)
        return self.epoch + 1 + later_epochs, steps * self.size

    def first_step(self, epoch: int) -> int:
        """Return the first step of this phase that reads `epoch` or a later epoch, if the phase never ended."""
        if epoch <= self.epoch:
            return self.step
        return self.step + self.steps_left + (epoch - self.epoch - 1) * self.steps_per_epoch


class EndingEpochs(RunningEpochs):
    """Epochs that each begin with a new step.

    With epochs of 10 rows and batches of 4, the last two rows are dropped: step 2 begins epoch 1. With `fill`, step 2 has these
    two rows and two empty slots, and step 3 begins epoch 1.
    """

    def __init__(self, num_rows: int, sizes: BatchSizes, start: tuple[int, int] = (0, 0), *, fill: bool) -> None:
        super().__init__(num_rows, sizes, start)

        def num_steps(rows: int, size: int) -> int:
            return -(-rows // size) if fill else rows // size

        self._phases: list[_Phase] = []
        epoch, index = start
        for step, size in zip(sizes.steps, sizes.sizes, strict=True):
            if self._phases:
                epoch, index = self._phases[-1].begin(step - 1)  # first row of the last step of the previous phase
                index = min(num_rows, index + self._phases[-1].size)
            steps_per_epoch = num_steps(num_rows, size)
            if not steps_per_epoch:
                problem = f"global_batch_size={size} is more than the {num_rows} rows of an epoch"
                fix = "Take a smaller batch, or last_batch='run_on' or 'fill'."
                raise SamplerError(f"{problem}, which has no full step. {fix}")
            self._phases.append(_Phase(step, size, epoch, index, num_steps(num_rows - index, size), steps_per_epoch))

    def begin(self, step: int) -> tuple[int, int]:
        return self._phases[bisect_right(self._sizes.steps, step) - 1].begin(step)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        epochs, indices = np.array([self.begin(step) for step in steps.tolist()], np.int64).reshape(-1, 2).T
        return epochs, indices

    def steps_before(self, epoch: int) -> int:
        first_steps = (phase.first_step(epoch) for phase in self._phases)
        ends = [*self._sizes.steps[1:], math.inf]
        # the first phase that reads `epoch` or a later epoch before the phase ends
        return next(first for first, end in zip(first_steps, ends, strict=True) if first < end)

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        first, last = self.steps_before(epoch), self.steps_before(epoch + 1) - 1
        if last < first or (num_steps is not None and first >= num_steps):
            return None
        begin = self.begin(first)[1]
        end = min(self.num_rows, self.begin(last)[1] + self._sizes.at(last))
        return EpochSpan(first, last, end - begin, begin)

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        cuts = self.cuts(epoch)
        number = np.searchsorted(cuts, indices, side="right") - 1  # number of the step in the epoch, if a step reads the index
        is_read = (number >= 0) & (number < len(cuts) - 1)
        return np.where(is_read, self.steps_before(epoch) + number, -1), indices - cuts[number]
