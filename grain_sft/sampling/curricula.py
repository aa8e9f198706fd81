"""Curricula of OLMo-core's `NumpyVSLDataset`: the batches of each bucket in an epoch, their order, and their sizes.

A bucket has all rows of one length. Bucket 0 has the shortest rows. All rows of a batch are of one bucket.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.layout import groups
from grain_sft.sampling.batch_sizes import ComputedSizes, StepRows
from grain_sft.sampling.orders.order import EPOCHS_KEPT
from grain_sft.types import Ints

Curriculum = Literal["natural", "grow_p2", "grow_linear"]
"""`natural` draws batches of all buckets at random. The others are the growing curricula: an epoch is divided into cycles, and
a cycle into subcycles, one for each bucket. A subcycle has batches of all buckets, shuffled. Subcycle b has the largest
share of the batches of bucket b."""


def batch_counts(curriculum: Curriculum, rows: Ints, sizes: Ints, num_cycles: int, balanced: bool) -> Ints:
    """Return the number of batches of each bucket in an epoch, int64 [buckets].

    Args:
      curriculum, num_cycles, balanced: As in `CurriculumSampler`.
      rows: Number of rows of each bucket, int64 [buckets].
      sizes: Number of rows in one batch of each bucket, int64 [buckets].

    Raises:
      SamplerError: An epoch has no batch, or OLMo-core refuses the curriculum.
    """
    counts: Ints = rows // sizes
    where = f"curriculum {curriculum!r}, buckets of {rows.tolist()} rows in batches of {sizes.tolist()} rows"
    if curriculum == "natural":
        if not counts[-1]:  # an epoch begins with a batch of the longest rows
            raise SamplerError(f"{where}: the last bucket, of the longest rows, fills no batch. Take a smaller batch.")
        return counts
    if balanced:
        counts = np.full_like(counts, counts.min())
    per_cycle = counts // num_cycles
    for bucket, count in enumerate(per_cycle.tolist()):
        subcycles = sum(_subcycles(curriculum, bucket, len(counts), count))
        if subcycles != count:
            problem = f"a cycle has {count} batches of bucket {bucket}; its subcycles have {subcycles}"
            raise SamplerError(f"{where}: {problem}. OLMo-core stops here, too. Change num_cycles or the batch.")
    if not per_cycle.any():
        raise SamplerError(f"{where}: no bucket fills {num_cycles} batches. Take a smaller batch, or fewer num_cycles.")
    return per_cycle * num_cycles


def batch_order(curriculum: Curriculum, counts: Ints, seed: int, num_cycles: int) -> Ints:
    """Return the numbers of an epoch's batches in the order of reading, int64 [batches].

    Batches are numbered bucket by bucket, from bucket 0 on. `counts` is a result of `batch_counts`. `seed` is the seed
    of the epoch, not of the run.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    num_batches = int(counts.sum())
    # The last bucket has the longest rows. Its batches have the numbers from `first_longest` on, and one begins the epoch. In a
    # growing curriculum, this bucket may have no batch. The order then stays as it is, as in OLMo-core.
    first_longest = num_batches - int(counts[-1])
    if curriculum == "natural":
        order: Ints = np.arange(num_batches)
        first = int(rng.integers(first_longest, num_batches))
        order[0], order[first] = first, 0
        rng.shuffle(order[1:])
        return order
    per_cycle = (counts // num_cycles).tolist()
    subcycles = [_subcycles(curriculum, bucket, len(counts), count) for bucket, count in enumerate(per_cycle)]
    begins = np.cumsum(counts) - counts  # next batch of each bucket
    parts = []
    # row i of the transpose has the number of batches of each bucket in subcycle i
    for counts_of_subcycle in np.tile(np.transpose(subcycles), (num_cycles, 1)):
        ends = begins + counts_of_subcycle
        parts.append(np.concatenate(list(map(np.arange, begins, ends))))
        rng.shuffle(parts[-1])
        begins = ends
    order = np.concatenate(parts)
    first = int(np.argmax(order >= first_longest))
    order[0], order[first] = order[first], order[0]
    return order


def _subcycles(curriculum: Curriculum, bucket: int, num_buckets: int, count: int) -> list[int]:
    """Divide `count`, the number of batches of a bucket in a cycle, among the subcycles of a growing curriculum.

    For bucket 1 of 4, counted from 0, the subcycles have the ranks 3, 4, 2 and 1. The ranks rise up to subcycle `bucket`, and
    the remaining ranks fall. In "grow_linear", the shares are in proportion to the ranks. In "grow_p2", they are in proportion
    to 2 ** (rank - 1): 4, 8, 2 and 1.
    """
    first = num_buckets - bucket
    ranks = [*range(first, num_buckets + 1), *range(first - 1, 0, -1)]
    shares = [2 ** (rank - 1) for rank in ranks] if curriculum == "grow_p2" else ranks
    subcycles = [round(share / sum(shares) * count) for share in shares]
    subcycles[-1] += max(0, count - sum(subcycles))  # if rounding gave too many batches, `batch_counts` refuses them
    return subcycles


class _Epoch(NamedTuple):
    """Order of an epoch's rows, in parts. First comes a part for each step, with the rows that the step reads. Then comes a
    part for each bucket, with the rows that no step reads."""

    bucket: Ints  # int64 [parts], bucket of the part's rows
    first_row: Ints  # int64 [parts], index of the part's first row in the order of its bucket's rows
    begins: Ints  # int64 [parts], index in the epoch at which the part begins


class CurriculumSizes(ComputedSizes):
    """Batch sizes of a run with a curriculum. Every epoch has the same number of batches of each bucket, in another order.

    Args:
      rows: Number of rows of each bucket, int64 [buckets].
      sizes: Number of rows in one batch of each bucket, int64 [buckets].
      counts: Number of batches of each bucket in an epoch, int64 [buckets].
      order: Function of an epoch's number that returns the order of the epoch's batches, as `batch_order` does.

    Attributes:
      num_steps: Number of steps of an epoch.
      num_rows: Number of rows that the steps of an epoch read.
    """

    def __init__(self, rows: Ints, sizes: Ints, counts: Ints, order: Callable[[int], Ints]) -> None:
        self.steps, self.sizes, self.schedule = [0], sizes.tolist(), ()
        self._rows, self._rows_per_batch, self._counts, self._order = rows, sizes, counts, order
        self.num_steps, self.num_rows = int(counts.sum()), int(np.dot(counts, sizes))
        self.epoch = functools.lru_cache(EPOCHS_KEPT)(self._epoch_of)

    def _epoch_of(self, epoch: int) -> _Epoch:
        order = self._order(epoch)
        ends = np.cumsum(self._counts)
        bucket = ends.searchsorted(order, side="right")  # bucket of each step
        batch = order - (ends - self._counts)[bucket]  # number of the step's batch among the batches of its bucket
        rows_read = self._counts * self._rows_per_batch  # number of rows of each bucket that steps read
        bucket_of_part = np.append(bucket, np.arange(len(rows_read)))
        num_rows = np.append(self._rows_per_batch[bucket], self._rows - rows_read)
        first_row = np.append(batch * self._rows_per_batch[bucket], rows_read)
        return _Epoch(bucket_of_part, first_row, np.cumsum(num_rows) - num_rows)

    def at(self, step: int) -> int:
        epoch, step_of_epoch = divmod(step, self.num_steps)
        return self.sizes[int(self.epoch(epoch).bucket[step_of_epoch])]

    def steps_of_one_size(self, step: int) -> int:
        return 1  # the next step may read another bucket

    def of_steps(self, steps: Ints) -> StepRows:
        epochs, steps_of_epoch = np.divmod(steps, self.num_steps)
        rows = StepRows(np.zeros_like(steps), np.zeros_like(steps))
        for number, selected in groups(epochs):
            epoch = self.epoch(number)
            rows.before[selected] = number * self.num_rows + epoch.begins[steps_of_epoch[selected]]
            rows.size[selected] = self._rows_per_batch[epoch.bucket[steps_of_epoch[selected]]]
        return rows

    def steps_of(self, rows: Ints) -> Ints:
        epochs, rows_of_epoch = np.divmod(rows, self.num_rows)
        steps = epochs * self.num_steps
        for number, selected in groups(epochs):
            steps[selected] += self.epoch(number).begins.searchsorted(rows_of_epoch[selected], side="right") - 1
        return steps
