"""Chains of a blend in fixed point: many stretches of Megatron-core's loop that advance together, one step at a time.

Each data set has an error, `weight * t - taken`. A step adds the weights to the errors, and subtracts 1 from the error of the
data set that it chooses. The bits below an error hold a code of its data set, so that one maximum finds both. Where a chain's
two greatest errors are closer than the rounding error, they are recomputed exactly as the loop computes them. Data sets of
equal weight take turns in their order, and share one error as a group.

Errors do not overflow: those of n data sets are between -1 and 1 + 1/2 + ... + 1/n (Adler, Berenbrink, Friedetzky, Goldberg,
Goldberg, Paterson: A proportionate fair scheduling rule with good worst-case performance, 2003).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from jaxtyping import Float64, UInt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Errors = npt.NDArray[np.signedinteger]

_STEPS = 32  # after which the rounding of the weights is corrected and choices are transposed
_NARROW = 64  # most data sets whose errors are int32, which takes half the time of int64


class Chains:
    """Chains of one blend.

    Args:
      weights: float64 [datasets], above 0, which sum to 1.

    Attributes:
      ties: Number of choices that needed the exact computation.
    """

    def __init__(self, weights: Float64[np.ndarray, " datasets"]) -> None:
        self._count, self.ties = len(weights), 0
        self._weights, self._group, sizes = np.unique(weights, return_inverse=True, return_counts=True)
        self._shared = len(sizes) < self._count
        self._sizes, self._firsts = sizes[:, None], (sizes.cumsum() - sizes)[:, None]
        self._members = self._group.argsort(kind="stable")
        numbers = np.arange(self._count)
        self._turn = np.empty(self._count, np.int64)  # of each data set in its group
        self._turn[self._members] = numbers - self._firsts[:, 0].repeat(sizes)
        whole = 4 if self._count <= _NARROW else 6  # bits of an error before the binary point
        self._dtype: np.dtype[np.signedinteger] = np.dtype(np.int32 if self._count <= _NARROW else np.int64)
        self._bits = self._count.bit_length()  # of codes: data set d has the code `count - d`
        fraction = 8 * self._dtype.itemsize - whole - self._bits
        self._scale, self._one = 2.0**fraction, 1 << (fraction + self._bits)
        self._row, self._passed = np.zeros((2, self._count + 1), np.int64)  # by code
        self._row[self._count - numbers] = self._group
        following = self._members[self._firsts[self._group, 0] + (self._turn + 1) % sizes[self._group]]
        self._passed[self._count - numbers] = numbers - following + self._one * (following > numbers)

    def run(self, begin: Floats, taken: Floats, steps: int) -> UInt[np.ndarray, "chains steps"]:
        """Advance chains and return the data sets that they choose.

        Args:
          begin: float64 [chains], first sample of each chain.
          taken: float64 [datasets, chains], samples taken from each data set before the chains begin. It is updated in place.
          steps: Number of samples that each chain chooses.
        """
        chains, mask = len(begin), (1 << self._bits) - 1
        errors = self._errors(begin, taken)
        flat, rows, columns = errors.reshape(-1), self._row * chains, np.arange(chains)
        best, second = np.empty((2, chains), self._dtype)
        place = np.empty(chains, np.int64)
        codes = np.empty((_STEPS, chains), np.min_scalar_type(self._count))
        found = np.empty((chains, steps), np.min_scalar_type(self._count - 1))
        rounding = _STEPS + 4 + math.ceil((begin.max() + steps) * 2.0**-50 * self._scale)
        limit, one = (rounding + 1) << self._bits, self._dtype.type(self._one)
        added = self._added(0, 1)
        for first in range(0, steps, _STEPS):
            for step, code in enumerate(codes[: steps - first], first):
                np.maximum.reduce(errors, axis=0, out=best)
                np.bitwise_and(best, mask, out=code, casting="unsafe")
                rows.take(code, out=place, mode="clip")
                np.add(place, columns, out=place)
                np.subtract.at(flat, place, one)
                np.maximum.reduce(errors, axis=0, out=second)
                np.subtract(best, second, out=second)
                if second.min() < limit:
                    at = (second < limit).nonzero()[0]
                    flat[place[at]] += one
                    code[at] = self._exact(begin[at] + step, errors[:, at])
                    place[at] = rows[code[at]] + at
                    flat[place[at]] -= one
                    self.ties += len(at)
                if self._shared:
                    np.add.at(flat, place, self._passed[code].astype(self._dtype))
                np.add(errors, added, out=errors)
            errors += self._added(first, first + _STEPS) - added * _STEPS
            found[:, first : first + _STEPS] = (self._count - codes[: steps - first]).T
        turn = self._turn[self._count - (errors & mask)]
        taken[...] = self._taken(begin + steps, errors)[self._group] + (self._turn[:, None] < turn[self._group])
        return found

    def _errors(self, begin: Floats, taken: Floats) -> Errors:
        """Return the first errors of all groups, [groups, chains], each above the code of the data set whose turn it is."""
        whole, turn = np.divmod(np.add.reduceat(taken[self._members], self._firsts[:, 0], axis=0), self._sizes)
        error = np.rint((self._weights[:, None] * begin - whole) * self._scale).astype(np.int64)
        code = self._count - self._members[self._firsts + turn.astype(np.int64)]
        return ((error << self._bits) + code).astype(self._dtype)

    def _added(self, first: int, stop: int) -> Errors:
        """Return the sum that the steps `first` to `stop` of a chain add to the error of each group, [groups, 1]."""
        bounds = np.rint(np.multiply.outer(self._weights * self._scale, [first, stop])).astype(np.int64)
        return (np.diff(bounds) << self._bits).astype(self._dtype)

    def _taken(self, sample: Floats, errors: Errors) -> Floats:
        """Return the samples taken from the data set whose turn it is in each group, [groups, chains]."""
        found: Floats = np.rint(self._weights[:, None] * sample - (errors >> self._bits) / self._scale)
        return found

    def _exact(self, sample: Floats, errors: Errors) -> Errors:
        """Return the code of the data set that the loop chooses for one sample of each chain, [chains]."""
        error = self._weights[:, None] * np.maximum(sample, 1) - self._taken(sample, errors)
        codes: Errors = np.where(error == error.max(axis=0), errors & ((1 << self._bits) - 1), 0).max(axis=0)
        return codes
