"""Batch sizes of a run whose every epoch has the same batches, of several sizes, in an order of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.orders import Ints

_EPOCHS_KEPT = 2


class _Epoch(NamedTuple):
    """Steps of an epoch: the bucket of each, the number of its batch in the bucket, and the rows before it (and in all)."""

    bucket: Ints
    batch: Ints
    begins: Ints


class CurriculumSizes(BatchSizes):
    """Rows of each step, where every epoch has the same batches in an order of its own.

    Args:
      sizes: Rows of a batch of each bucket, int64 [buckets].
      counts: Batches of each bucket in an epoch, int64 [buckets].
      order: Function of an epoch that returns its batches in order, as `batch_order` does.
    """

    def __init__(self, sizes: Ints, counts: Ints, order: Callable[[int], Ints]) -> None:
        self.steps, self.sizes = [0], sizes.tolist()
        self._rows, self._counts, self._order = sizes, counts, order
        self.num_steps, self.num_rows = int(counts.sum()), int(np.dot(counts, sizes))
        self.epoch = functools.lru_cache(_EPOCHS_KEPT)(self._epoch_of)

    def _epoch_of(self, epoch: int) -> _Epoch:
        order, ends = self._order(epoch), np.cumsum(self._counts)
        bucket = ends.searchsorted(order, side="right")
        begins = np.append(0, np.cumsum(self._rows[bucket]))
        return _Epoch(bucket, order - (ends - self._counts)[bucket], begins)

    @property
    def schedule(self) -> tuple[tuple[int, int], ...]:
        return ()

    def at(self, step: int) -> int:
        epoch, at = divmod(step, self.num_steps)
        return self.sizes[int(self.epoch(epoch).bucket[at])]

    def steps_of_one_size(self, step: int) -> int:
        return 1

    def before(self, step: int) -> int:
        epoch, at = divmod(step, self.num_steps)
        return epoch * self.num_rows + int(self.epoch(epoch).begins[at])

    def step_of(self, row: int) -> int:
        return int(self.steps_of(np.array([row]))[0])

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        epochs, at = np.divmod(steps, self.num_steps)
        before, sizes = np.zeros_like(steps), np.zeros_like(steps)
        for epoch in np.unique(epochs).tolist():
            here, found = np.flatnonzero(epochs == epoch), self.epoch(epoch)
            before[here] = epoch * self.num_rows + found.begins[at[here]]
            sizes[here] = self._rows[found.bucket[at[here]]]
        return before, sizes

    def steps_of(self, rows: Ints) -> Ints:
        epochs, at = np.divmod(rows, self.num_rows)
        steps = epochs * self.num_steps
        for epoch in np.unique(epochs).tolist():
            here = np.flatnonzero(epochs == epoch)
            steps[here] += self.epoch(epoch).begins.searchsorted(at[here], side="right") - 1
        return steps

    def shared(self, hosts: int) -> BatchSizes:
        self.check_from(0, hosts)
        return CurriculumSizes(self._rows // hosts, self._counts, self._order)

    def check_from(self, step: int, hosts: int) -> None:
        BatchSizes(self.sizes[-1]).check_from(step, hosts)  # the other sizes are multiples of that of the longest rows
