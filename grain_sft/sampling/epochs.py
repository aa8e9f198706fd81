"""Where epochs begin among the steps of a run, whose batches may change in size."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from typing import Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.streams import EpochSpan

Ints = npt.NDArray[np.int64]


class Epochs(Protocol):
    """Epochs of one number of rows, cut into steps. They are those of a stream: of all hosts, or of one host's blocks."""

    def begin(self, step: int) -> tuple[int, int]:
        """Return the epoch in which `step` begins, and the index of its first row there."""

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return the same for many steps, int64 [n]."""

    def steps_before(self, epoch: int) -> int:
        """Return the number of steps whose rows are all in the epochs before `epoch`."""

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        """Return the steps that read an epoch in a run of `num_steps` (None: without end); None where none does."""

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        """Return the step that reads each index of an epoch, int64 [n], -1 where none does; and its slot in the step."""


class RunningEpochs:
    """Epochs that follow each other without a gap: a step may straddle two."""

    def __init__(self, num_rows: int, sizes: BatchSizes) -> None:
        self._rows, self._sizes = num_rows, sizes

    def begin(self, step: int) -> tuple[int, int]:
        return divmod(self._sizes.before(step), self._rows)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        return np.divmod(self._sizes.begins(steps)[0], self._rows)

    def steps_before(self, epoch: int) -> int:
        return self._sizes.step_of(epoch * self._rows)

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        first, end = epoch * self._rows, (epoch + 1) * self._rows
        if num_steps is not None:
            end = min(end, self._sizes.before(num_steps))
        if end <= first:
            return None
        return EpochSpan(self._sizes.step_of(first), self._sizes.step_of(end - 1), end - first)

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        rows = indices + epoch * self._rows
        steps = self._sizes.steps_of(rows)
        return steps, rows - self._sizes.begins(steps)[0]


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Steps of one size."""

    step: int  # the first
    size: int
    epoch: int  # in which it begins, at `index`
    index: int
    steps_left: int  # of this size, in that epoch
    steps_per_epoch: int  # of this size, in the epochs after it


class EndingEpochs:
    """Epochs that each begin with a step. An epoch ends where the next batch, of whatever size, is not full, and its
    remaining rows are dropped; or, with `fill`, where it has no rows left, and its last batch is filled up.

    Raises:
      SamplerError: A batch that is never full.
    """

    def __init__(self, num_rows: int, sizes: BatchSizes, *, fill: bool) -> None:
        self._rows, self._fill = num_rows, fill
        self._pieces: list[_Piece] = []
        for step, size in zip(sizes.steps, sizes.sizes, strict=True):
            epoch, index = 0, 0
            if self._pieces:
                epoch, index = self._end_of(step - 1)
            per_epoch = self._steps_in(num_rows, size)
            if not per_epoch:
                raise SamplerError(
                    f"global_batch_size={size} is more than the {num_rows} rows of an epoch, which has no full step. Take a "
                    "smaller batch, last_batch='run_on', or last_batch='fill' for evaluation."
                )
            left = self._steps_in(num_rows - index, size)
            self._pieces.append(_Piece(step, size, epoch, index, left, per_epoch))
        self._first_steps = [piece.step for piece in self._pieces]
        self._columns = np.array([dataclasses.astuple(piece) for piece in self._pieces], np.int64).T

    def _steps_in(self, rows: int, size: int) -> int:
        return -(-rows // size) if self._fill else rows // size

    def _end_of(self, step: int) -> tuple[int, int]:
        """Return the epoch of `step`, in the last piece so far, and the rows of that epoch that are read after it."""
        epoch, index = self._begin(self._pieces[-1], step)
        return epoch, min(self._rows, index + self._pieces[-1].size)

    @staticmethod
    def _begin(piece: _Piece, step: int) -> tuple[int, int]:
        into = step - piece.step
        if into < piece.steps_left:
            return piece.epoch, piece.index + into * piece.size
        epochs, into = divmod(into - piece.steps_left, piece.steps_per_epoch)
        return piece.epoch + 1 + epochs, into * piece.size

    def begin(self, step: int) -> tuple[int, int]:
        pieces = self._pieces
        return self._begin(pieces[0] if len(pieces) == 1 else pieces[bisect_right(self._first_steps, step) - 1], step)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        which = np.searchsorted(self._first_steps, steps, side="right") - 1
        first, size, epoch, index, left, per_epoch = self._columns[:, which]
        into = steps - first
        here = into < left
        later, rest = np.divmod(into - left, per_epoch)
        return np.where(here, epoch, epoch + 1 + later), np.where(here, index + into * size, rest * size)

    def steps_before(self, epoch: int) -> int:
        for piece, following in zip(self._pieces, [*self._first_steps[1:], None], strict=True):
            step = piece.step
            if epoch > piece.epoch:
                step += piece.steps_left + (epoch - piece.epoch - 1) * piece.steps_per_epoch
            if following is None or step < following:
                return step
        raise AssertionError("the last piece has no end")

    def span(self, epoch: int, num_steps: int | None) -> EpochSpan | None:
        first, last = self.steps_before(epoch), self.steps_before(epoch + 1) - 1
        if num_steps is not None and first >= num_steps:
            return None
        size = self._pieces[bisect_right(self._first_steps, last) - 1].size
        return EpochSpan(first, last, min(self._rows, self.begin(last)[1] + size))

    def find(self, epoch: int, indices: Ints) -> tuple[Ints, Ints]:
        steps, slots = np.full(len(indices), -1, np.int64), np.zeros(len(indices), np.int64)
        for piece, following in zip(self._pieces, [*self._first_steps[1:], None], strict=True):
            if epoch < piece.epoch:
                break
            first, begin, count = piece.step, piece.index, piece.steps_left
            if epoch > piece.epoch:
                first += count + (epoch - piece.epoch - 1) * piece.steps_per_epoch
                begin, count = 0, piece.steps_per_epoch
            if following is not None:
                count = min(count, following - first)
            if count > 0:
                into, slot = np.divmod(indices - begin, piece.size)
                here = (into >= 0) & (into < count)
                steps[here], slots[here] = first + into[here], slot[here]
        return steps, slots
