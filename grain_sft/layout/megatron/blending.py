"""Blend of Megatron-core's `BlendedDataset`: the data set that each sample comes from.

Sample t comes from the data set with the greatest `weight * max(t, 1) - taken`, in float64. `taken` is the number of samples
before sample t that come from the data set. If several data sets have the greatest value, the first is chosen. megatron-core
loops over all samples. This module divides the samples into blocks of `BLOCK` samples. A chain is the loop over the samples of
one block. Thousands of chains run at once:

1. A chain guesses its first values of `taken` in proportion to the weights.
2. A chain starts some steps before its first sample. These steps correct small errors of the guess: if `taken` of a data set is
   too high by 1, the data set is chosen once less.
3. If the values of `taken` at the start of chain i differ from the values at the end of chain i - 1, chain i runs again, from
   the values of chain i - 1. This repeats until no chain differs. So the result is always the loop's result.

`bench --only megatron` compares the speed of this module with that of megatron-core's compiled loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout.pieces import expand_counts
from grain_sft.types import Floats, Ints, UnsignedInts

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64, Integer, UInt

BLOCK = 1 << 10
"""Number of samples of a chain."""

STEPS = 4
"""A chain has `STEPS` correcting steps for each data set, but at most half a block in all."""

_CHAINS = 1 << 13  # maximum number of chains that run at once: so their arrays stay in the processor's cache


class Blend(NamedTuple):
    """The data set of each sample, and counts from which `numbers_of` computes the sample's number in its data set."""

    chosen: UInt[np.ndarray, " samples"]  # number of the data set of each sample
    taken: Int64[np.ndarray, "blocks datasets"]  # samples taken from each data set before each block of `BLOCK` samples

    def numbers_of(self, rows: Int64[np.ndarray, " rows"]) -> tuple[Ints, Ints]:
        """Return the data set of each row, and the row's number among the samples of that data set: int64 [rows] each."""
        dataset = self.chosen[rows].astype(np.int64)
        block, within = np.divmod(rows, BLOCK)
        number: Ints = self.taken[block, dataset]  # samples before the block
        by_block = block.argsort(kind="stable")
        borders = np.flatnonzero(np.diff(block[by_block])) + 1
        for in_block in np.split(by_block, borders):  # one or two passes for a batch of consecutive rows
            first = int(block[in_block[0]]) * BLOCK
            chosen = self.chosen[first : first + BLOCK]
            order = chosen.argsort(kind="stable")
            earlier = np.empty(len(chosen), np.int64)  # for each sample, earlier samples of its data set in the block
            earlier[order] = expand_counts(np.bincount(chosen))[1]
            number[in_block] += earlier[within[in_block]]
        return dataset, number

    @property
    def counts(self) -> Ints:
        """Number of samples taken from each data set, int64 [datasets]."""
        last = np.bincount(self.chosen[(len(self.taken) - 1) * BLOCK :], minlength=self.taken.shape[1])
        counts: Ints = self.taken[-1] + last
        return counts


def blend_of(chosen: Integer[np.ndarray, " samples"], datasets: int) -> Blend:
    """Return the blend whose sample i comes from data set `chosen[i]`, a number in [0, datasets)."""
    blocks = -(-len(chosen) // BLOCK)
    block_and_dataset = np.arange(len(chosen)) // BLOCK * datasets + chosen
    taken = np.bincount(block_and_dataset, minlength=blocks * datasets).reshape(blocks, datasets)
    return Blend(chosen.astype(np.min_scalar_type(datasets - 1)), taken.cumsum(axis=0) - taken)


def normalized(weights: npt.ArrayLike) -> Floats:
    """Return the weights divided by their sum, float64 [n], with megatron-core's rounding."""
    as_array = np.array(weights, np.float64)
    return as_array / np.sum(as_array)


def blend(weights: Float64[np.ndarray, " datasets"], size: int) -> Blend:
    """Return the blend of `size` samples (1 or more) by `weights`, which sum to 1."""
    blocks, datasets, steps = -(-size // BLOCK), len(weights), min(size, BLOCK)
    chosen = np.empty((blocks, steps), np.min_scalar_type(datasets - 1))
    step = np.arange(blocks, dtype=np.float64) * BLOCK
    at_begin, at_end = np.zeros((2, datasets, blocks))  # `taken` at the start and at the end of each chain

    def run(group: slice | Ints) -> None:
        """Run the chains of a group from `at_begin`, and set `at_end` and `chosen`."""
        taken = at_begin[:, group].copy(order="C")
        chosen[group] = _run(weights, step[group], taken, steps)
        at_end[:, group] = taken

    groups = -(-blocks // _CHAINS)
    group_size = -(-blocks // groups)
    early = min(STEPS * datasets, BLOCK // 2)  # steps that a chain runs before its first sample
    for first in range(0, blocks, group_size):  # two threads would take as long, and twice the processor time
        group = slice(first, first + group_size)
        taken = _guess(weights, step[group] - early)
        _run(weights, step[group] - early, taken, early)
        at_begin[:, group] = taken
        at_begin[:, 0] = 0  # no sample comes before the first chain
        run(group)
    while len(wrong := 1 + np.flatnonzero((at_end[:, :-1] != at_begin[:, 1:]).any(axis=0))):
        at_begin[:, wrong] = at_end[:, wrong - 1]
        run(wrong)
    return Blend(chosen.reshape(-1)[:size], at_begin.T.astype(np.int64))


def _guess(weights: Floats, step: Floats) -> Floats:
    """Return `taken` in proportion to the weights, in whole numbers that add up to `step`: float64 [datasets, chains].

    With weights 0.7 and 0.3, step 12 has the exact values 8.4 and 3.6, and the result is 8 and 4.
    """
    exact = np.multiply.outer(weights, step)
    taken = np.floor(exact)
    # rank 0 has the greatest fraction, which is rounded up first
    rank = np.argsort(np.argsort(taken - exact, axis=0, kind="stable"), axis=0, kind="stable")
    taken += rank < step - taken.sum(axis=0)
    return taken


def _run(weights: Floats, step: Floats, taken: Floats, steps: int) -> UnsignedInts:
    """Run chains and return the data sets that they choose, [chains, steps].

    The error of a data set is `weight * max(t, 1) - taken`. A chain chooses the first data set with the greatest error.
    `np.argmax` would take 7 times as long for 8 data sets. So data set d has the code `datasets - d`, and a chain chooses the
    greatest code among the data sets with the greatest error. Example of one chain:

      data set   error   error is greatest   code   product
      0          0.4     False               3      0
      1          0.7     True                2      2, the maximum: the chain chooses data set 1
      2          0.7     True                1      1

    Args:
      step: float64 [chains], number of each chain's first sample; below 0 in the correcting steps of the first chain.
      taken: float64 [datasets, chains], samples taken from each data set before the chains begin. It is updated in place.
      steps: Number of samples that each chain chooses.
    """
    datasets, chains = taken.shape
    codes = np.arange(datasets, 0, -1).astype(np.min_scalar_type(datasets))[:, None]
    chosen: UnsignedInts = np.empty((steps, chains), codes.dtype)
    weights, flat_taken = weights[:, None], taken.reshape(-1)
    # `taken` of data set d in chain c has the index `chains * d + c` in `flat_taken`. Because d is `datasets - code`, this
    # index is `past_last[c] - chains * code`.
    past_last = np.arange(chains) + taken.size
    error = np.empty(taken.shape)
    for number, code in enumerate(chosen):  # `code` is a view of `chosen`: each chain's choice
        np.multiply(weights, np.maximum(step + number, 1), out=error)
        error -= taken
        np.max((error == error.max(axis=0)) * codes, axis=0, out=code)
        np.add.at(flat_taken, past_last - chains * code.astype(np.int64), 1.0)
    return np.subtract(datasets, chosen, out=chosen).T  # from codes to numbers of data sets
