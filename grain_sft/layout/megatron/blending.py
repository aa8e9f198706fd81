"""Blend of Megatron-core's `BlendedDataset`: the data set that each sample comes from.

Sample t comes from the data set with the greatest `weight * max(t, 1) - taken`, in float64. Of equals, the first is chosen.
In megatron-core this is a loop, and each of its steps depends on the step before. Here thousands of chains run at once, each
over its own block of `BLOCK` samples:

1. Each chain guesses `taken` at its first sample in proportion to the weights.
2. It begins some steps before its first sample. They correct the guess: a data set with a sample too many is chosen later.
3. Each chain's first `taken` is compared with the last of the chain before it. Chains that differ run again from that value,
   so the result is that of the loop for any guesses.

`bench --only megatron` measures this against the compiled loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64, Integer, UInt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Numbers = npt.NDArray[np.unsignedinteger]

BLOCK = 1 << 10
"""Number of samples of a chain."""

STEPS = 4
"""Number of steps per data set that a chain runs to correct its guess."""

_CHAINS = 1 << 13  # run at once, so that their arrays stay in the processor's cache


class Blend(NamedTuple):
    """The data set of each sample, with the counts that find a sample's number in its data set.

    Attributes:
      chosen: uint8 or uint16 [samples], number of the data set of each sample.
      taken: int64 [blocks, datasets], number of samples taken from each data set before each block of `BLOCK` samples.
    """

    chosen: UInt[np.ndarray, " samples"]
    taken: Int64[np.ndarray, "blocks datasets"]

    def numbers_of(self, rows: Int64[np.ndarray, " rows"]) -> tuple[Ints, Ints]:
        """Return the data set of each row, and the row's number among the samples of that data set: int64 [rows] each."""
        dataset = self.chosen[rows].astype(np.int64)
        block, within = np.divmod(rows, BLOCK)
        number: Ints = self.taken[block, dataset]
        by_block = block.argsort(kind="stable")
        borders = np.flatnonzero(np.diff(block[by_block])) + 1
        for asked in np.split(by_block, borders) if len(rows) else ():  # a batch of rows in order has one or two blocks
            first = int(block[asked[0]]) * BLOCK
            here = self.chosen[first : first + BLOCK]
            order = here.argsort(kind="stable")
            chosen = here[order]
            in_block = np.empty(len(here), np.int64)
            in_block[order] = np.arange(len(here)) - chosen.searchsorted(chosen)
            number[asked] += in_block[within[asked]]
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
    places = np.arange(len(chosen)) // BLOCK * datasets + chosen
    taken = np.bincount(places, minlength=blocks * datasets).reshape(blocks, datasets)
    return Blend(chosen.astype(np.min_scalar_type(datasets - 1)), taken.cumsum(axis=0) - taken)


def normalized(weights: npt.ArrayLike) -> Floats:
    """Return the weights divided by their sum, float64 [n], with megatron-core's rounding."""
    given = np.array(weights, np.float64)
    return given / np.sum(given)


def blend(weights: Float64[np.ndarray, " datasets"], size: int) -> Blend:
    """Return the blend of `size` samples (1 or more) by `weights`, which sum to 1."""
    blocks, datasets, steps = -(-size // BLOCK), len(weights), min(size, BLOCK)
    chosen = np.empty((blocks, steps), np.min_scalar_type(datasets - 1))
    step = np.arange(blocks, dtype=np.float64) * BLOCK
    begun, ended = np.zeros((2, datasets, blocks))

    def run(group: slice | Ints) -> None:
        taken = begun[:, group].copy(order="C")
        chosen[group] = _run(weights, step[group], taken, steps)
        ended[:, group] = taken

    chains, warm = -(-blocks // -(-blocks // _CHAINS)), min(STEPS * datasets, BLOCK // 2)
    for first in range(0, blocks, chains):  # a second thread doubles the processor time and saves nothing
        group = slice(first, first + chains)
        taken = _guess(weights, step[group] - warm)
        _run(weights, step[group] - warm, taken, warm)
        begun[:, group] = taken
        begun[:, 0] = 0
        run(group)
    while len(wrong := 1 + np.flatnonzero((ended[:, :-1] != begun[:, 1:]).any(axis=0))):
        begun[:, wrong] = ended[:, wrong - 1]
        run(wrong)
    return Blend(chosen.reshape(-1)[:size], begun.T.astype(np.int64))


def _guess(weights: Floats, step: Floats) -> Floats:
    """Return samples taken from each data set before each step, in proportion to the weights: float64 [datasets, chains]."""
    wanted = np.multiply.outer(weights, step)
    taken = np.floor(wanted)
    rank = np.argsort(np.argsort(taken - wanted, axis=0, kind="stable"), axis=0, kind="stable")
    taken += rank < step - taken.sum(axis=0)
    return taken


def _run(weights: Floats, step: Floats, taken: Floats, steps: int) -> Numbers:
    """Run chains and return the data sets that they choose, [chains, steps].

    Args:
      taken: float64 [datasets, chains], samples taken from each data set before the chains begin. It is updated in place.
    """
    datasets, chains = taken.shape
    codes = np.arange(datasets, 0, -1).astype(np.min_scalar_type(datasets))[:, None]  # the first has the highest
    chosen: Numbers = np.empty((steps, chains), codes.dtype)
    weights, flat, last = weights[:, None], taken.reshape(-1), np.arange(chains) + taken.size
    error = np.empty(taken.shape)
    for number, code in enumerate(chosen):
        np.multiply(weights, np.maximum(step + number, 1), out=error)
        error -= taken
        np.max((error == error.max(axis=0)) * codes, axis=0, out=code)
        np.add.at(flat, last - chains * code.astype(np.int64), 1.0)
    return np.subtract(datasets, chosen, out=chosen).T
