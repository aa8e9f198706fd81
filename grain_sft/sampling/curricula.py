"""Curricula of OLMo-core's `NumpyVSLDataset`: the batches of each bucket in an epoch, their order, and their sizes."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import ComputedSizes
from grain_sft.sampling.orders.order import EPOCHS_KEPT, Ints

Curriculum = Literal["natural", "grow_p2", "grow_linear"]

_ODDS: dict[str, Callable[[int], int]] = {"grow_p2": lambda rank: 2 ** (rank - 1), "grow_linear": lambda rank: rank}
"""Relative number of batches in the subcycle of a rank, from 1. Curricula without an entry don't grow."""


def batch_counts(curriculum: Curriculum, rows: Ints, sizes: Ints, num_cycles: int, balanced: bool) -> Ints:
    """Return the number of batches of each bucket in an epoch, int64 [buckets].

    Args:
      curriculum: Name of the curriculum.
      rows, sizes: Rows of each bucket, and rows of one of its batches, int64 [buckets].
      num_cycles: Number of cycles of a growing curriculum. It divides the number of batches of each bucket.
      balanced: Whether a growing curriculum takes the same number of batches of every bucket.

    Raises:
      SamplerError: No batch is left, or OLMo-core cannot build the curriculum from these buckets.
    """
    counts: Ints = rows // sizes
    where = f"curriculum {curriculum!r}, batches of {sizes.tolist()} rows of buckets of {rows.tolist()} rows"
    if curriculum in _ODDS:
        counts = num_cycles * ((np.full_like(counts, counts.min()) if balanced else counts) // num_cycles)
        for bucket, count in enumerate(counts.tolist()):
            parts = _subcycles(curriculum, bucket, len(counts), count // num_cycles)
            if sum(parts) != count // num_cycles:
                found = f"a cycle has {count // num_cycles} batches of bucket {bucket}; its subcycles have {sum(parts)}"
                raise SamplerError(f"{where}: {found}. OLMo-core stops here, too. Change num_cycles or the batch.")
    elif not counts[-1]:
        raise SamplerError(f"{where}: the last bucket, of the longest rows, fills no batch. Take a smaller batch.")
    if not counts.any():
        raise SamplerError(f"{where}: no bucket fills {num_cycles} batches. Take a smaller batch, or fewer num_cycles.")
    return counts


def batch_order(curriculum: Curriculum, counts: Ints, seed: int, num_cycles: int) -> Ints:
    """Return the batches of an epoch in reading order: int64 [batches], numbered bucket by bucket.

    Args:
      curriculum: Name of the curriculum.
      counts: Number of batches of each bucket, as `batch_counts` returns it.
      seed: Seed of the epoch.
      num_cycles: Number of cycles of a growing curriculum.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order: Ints = np.arange(counts.sum())
    longest = len(order) - int(counts[-1])  # first batch of the longest rows; one of these batches is read first
    if curriculum not in _ODDS:
        _swap(order, int(rng.integers(longest, len(order))))
        rng.shuffle(order[1:])
        return order
    per_cycle, firsts = counts // num_cycles, np.cumsum(counts) - counts
    parts = [_subcycles(curriculum, bucket, len(counts), count) for bucket, count in enumerate(per_cycle.tolist())]
    ends = np.cumsum(parts, axis=1).T  # [subcycles, buckets]
    starts = ends - np.array(parts).T
    found = []
    for cycle in range(num_cycles):
        begins = firsts + cycle * per_cycle
        for bounds in zip(starts + begins, ends + begins, strict=True):
            batches = np.concatenate([order[first:end] for first, end in zip(*bounds, strict=True)])
            rng.shuffle(batches)
            found.append(batches)
    order = np.concatenate(found)
    _swap(order, int(np.argmax(order >= longest)))
    return order


def _swap(order: Ints, place: int) -> None:
    order[0], order[place] = order[place], order[0]


def _subcycles(curriculum: Curriculum, bucket: int, num_buckets: int, count: int) -> Sequence[int]:
    """Return the number of batches in each of the `num_buckets` subcycles of a bucket with `count` batches in a cycle."""
    first = num_buckets - bucket
    ranks = (first + each for each in range(num_buckets))
    odds = [_ODDS[curriculum](rank if rank <= num_buckets else first - rank % num_buckets) for rank in ranks]
    total = sum(odds)
    parts = [round(each / total * count) for each in odds]
    parts[-1] += max(0, count - sum(parts))
    return parts


class _Epoch(NamedTuple):
    """Steps of an epoch.

    Attributes:
      bucket, batch: Bucket of each step, and number of its batch in the bucket, int64 [steps].
      begins: Number of rows before each step, then of all rows, int64 [steps + 1].
    """

    bucket: Ints
    batch: Ints
    begins: Ints


class CurriculumSizes(ComputedSizes):
    """Batch sizes of a run whose epochs all have the same batches, each in its own order.

    Args:
      sizes: Rows of a batch of each bucket, int64 [buckets].
      counts: Batches of each bucket in an epoch, int64 [buckets].
      order: Function of an epoch that returns its batches in order, as `batch_order` does.
    """

    def __init__(self, sizes: Ints, counts: Ints, order: Callable[[int], Ints]) -> None:
        self.steps, self.sizes, self.schedule = [0], sizes.tolist(), ()
        self._rows, self._counts, self._order = sizes, counts, order
        self.num_steps, self.num_rows = int(counts.sum()), int(np.dot(counts, sizes))
        self.epoch = functools.lru_cache(EPOCHS_KEPT)(self._epoch_of)

    def _epoch_of(self, epoch: int) -> _Epoch:
        order, ends = self._order(epoch), np.cumsum(self._counts)
        bucket = ends.searchsorted(order, side="right")
        begins = np.append(0, np.cumsum(self._rows[bucket]))
        return _Epoch(bucket, order - (ends - self._counts)[bucket], begins)

    def at(self, step: int) -> int:
        epoch, at = divmod(step, self.num_steps)
        return self.sizes[int(self.epoch(epoch).bucket[at])]

    def steps_of_one_size(self, step: int) -> int:
        return 1

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
