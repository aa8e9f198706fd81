"""The blend of Megatron-core's `BlendedDataset`: from which data set each sample is.

Sample t is of the data set with the greatest `weight * max(t, 1) - taken`, the first of equals, in 64-bit floating point. That
is a loop over samples in which each step needs the one before. Here thousands of chains run it at once, each over its own
part of the samples. Where a chain begins, the samples taken so far are guessed to be in proportion to the weights, and some
steps before its part correct the guess: a data set that was given one too many waits for its turn. What a chain began with is
then compared with what the chain before it ended with, and a chain that began with anything else runs again, so the result is
the loop's, whatever was guessed. `bench --only megatron` measures it beside the compiled loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxtyping import Float64, UInt16

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

BLOCK = 1 << 10
"""Samples between two entries of the counts of a `Blend`."""

_CHAINS = 1 << 13
_STEPS = 8  # per data set, that correct a guess


def normalized(weights: npt.ArrayLike) -> Floats:
    """Return weights divided by their sum, float64 [n], rounded as megatron-core rounds them."""
    given = np.array(weights, np.float64)
    found: Floats = given / np.sum(given)
    return found


def blend(weights: Float64[np.ndarray, " datasets"], size: int) -> UInt16[np.ndarray, " size"]:
    """Return the number of the data set of each of `size` samples, for weights that sum to 1."""
    found = np.zeros(size, np.uint16)
    if not size:
        return found
    first = int(weights.argmax())
    found[0], count, warm = first, size - 1, _STEPS * len(weights)
    chains = max(1, min(_CHAINS, count // (4 * warm)))
    steps = -(-count // chains)
    step = np.arange(chains, dtype=np.float64) * steps + 1
    taken = _guess(weights, np.maximum(step - warm, 0))
    _run(weights, step - warm, taken, np.empty((warm, chains), np.uint16))
    taken[:, 0] = np.arange(len(weights)) == first
    begun, chosen = taken.copy(), np.empty((steps, chains), np.uint16)
    _run(weights, step, taken, chosen)
    while len(wrong := 1 + np.flatnonzero((taken[:, :-1] != begun[:, 1:]).any(axis=0))):
        begun[:, wrong] = taken[:, wrong - 1]
        ended, again = np.ascontiguousarray(begun[:, wrong]), np.empty((steps, len(wrong)), np.uint16)
        _run(weights, step[wrong], ended, again)
        taken[:, wrong], chosen[:, wrong] = ended, again
    found[1:] = chosen.T.reshape(-1)[:count]
    return found


def _guess(weights: Floats, step: Floats) -> Floats:
    """Return samples taken of each data set before each step, float64 [datasets, chains], in proportion to the weights."""
    wanted = np.multiply.outer(weights, step)
    taken = np.floor(wanted)
    rank = np.argsort(np.argsort(taken - wanted, axis=0, kind="stable"), axis=0, kind="stable")
    taken += rank < step - taken.sum(axis=0)
    return taken


def _run(weights: Floats, step: Floats, taken: Floats, chosen: npt.NDArray[np.uint16]) -> None:
    """Run chains (float64 [chains]: the step where each begins), and add what each took to `taken`, float64 [datasets, chains].
    `chosen`, uint16 [steps, chains], is filled with the data sets."""
    shape, chains = step.shape, len(step)
    step, columns = step.copy(), np.arange(chains)
    error, greatest, place = np.empty(shape), np.empty(shape), np.empty(shape, np.int64)
    greater, number = np.empty(shape, np.bool_), np.empty(shape, np.uint16)
    flat = taken.reshape(-1)
    for row in chosen:
        np.multiply(step, weights[0], out=greatest)
        np.subtract(greatest, taken[0], out=greatest)
        row[:] = 0
        for dataset in range(1, len(weights)):
            np.multiply(step, weights[dataset], out=error)
            np.subtract(error, taken[dataset], out=error)
            np.greater(error, greatest, out=greater)
            np.maximum(greatest, error, out=greatest)
            np.multiply(greater, dataset, out=number, dtype=np.uint16)
            np.maximum(row, number, out=row)  # numbers grow, so the last that was greater stays
        np.multiply(row, chains, out=place, dtype=np.int64)
        place += columns
        flat[place] += 1
        step += 1


def counts_of(chosen: npt.NDArray[np.integer], datasets: int) -> Ints:
    """Return the samples of each data set before each block of `BLOCK` samples, and all: int64 [blocks + 1, datasets]."""
    blocks = [chosen[begin : begin + BLOCK] for begin in range(0, len(chosen), BLOCK)]
    found = np.zeros((len(blocks) + 1, datasets), np.int64)
    for number, block in enumerate(blocks):
        found[number + 1] = np.bincount(block, minlength=datasets)
    return found.cumsum(axis=0)


def numbers_in(chosen: npt.NDArray[np.integer], counts: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Return the data set of each of `rows`, and its number among that data set's samples: int64 [n] each."""
    dataset = chosen[rows].astype(np.int64)
    block, within = np.divmod(rows, BLOCK)
    at = block[:, None] * BLOCK + np.arange(BLOCK)
    same = chosen[np.minimum(at, len(chosen) - 1)] == dataset[:, None]
    same &= np.arange(BLOCK) < within[:, None]
    return dataset, counts[block, dataset] + np.count_nonzero(same, axis=1)
