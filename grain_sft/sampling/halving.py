"""HalvingTree: choices among sources by formula, for weights whose period is too long for a table."""

import dataclasses
import math
from fractions import Fraction
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from grain_sft.sampling.orders import Ints

_HALF = Fraction(1, 2)
_ALL_TRIED = 9  # sources up to which every cut is tried
_INT64_LIMIT = 1 << 62  # larger products are computed as Python integers


@dataclasses.dataclass(frozen=True)
class _Split:
    """Two-way split. Of the first t rows that reach it, the left branch gets floor(share * t + offset), clipped to [0, t]."""

    share: Fraction
    offset: Fraction

    def lefts(self, rows: Ints) -> Ints:
        """Return how many of the first `rows` go left, int64 [n]."""
        unit = math.lcm(self.share.denominator, self.offset.denominator)
        step, first = int(self.share * unit), int(self.offset * unit)
        found = np.asarray((_wide(rows, unit) * step + first) // unit)
        lefts: Ints = np.minimum(np.maximum(found, 0), rows).astype(np.int64)
        return lefts

    def find(self, numbers: Ints, left: bool) -> Ints:
        """Return the rows that are `numbers`, from 0, of those that go left (or right)."""
        share = self.share if left else 1 - self.share
        # left: the first t with share * t + offset >= number + 1; right: with share * t - offset > number
        past = 1 - self.offset if left else self.offset
        unit = past.denominator
        up, down = share.denominator, share.numerator
        scaled = (_wide(numbers, unit * up) * unit + int(past * unit)) * up
        first = -(-scaled // (down * unit)) if left else scaled // (down * unit) + 1
        row: Ints = np.maximum(np.asarray(first), numbers + 1).astype(np.int64) - 1
        return row


_Tree: TypeAlias = "int | tuple[_Split, _Tree, _Tree]"  # int: a source


class HalvingTree:
    """Sources of the rows of constant weights, from row 0 on.

    Rows go down a tree of two-way splits. Of the first t rows that reach a node, its left branch gets t times its share,
    rounded. So a few divisions find the source of any row, without a table. Rounding costs precision: a branch is up to half
    a row from its part of the node's rows, and inherits its part of the node's distance. `bound` is the sum: at most 1 row for
    up to 4 sources, 1.2 for up to 10, and less than 2 for any number. The largest distance measured is 1.26 rows, over 4,600
    sets of weights for 2 to 24 sources (tests/sampling/test_proportions.py). `ScheduleTable` stays below one row, so it is
    used where it fits. Quantised weights would need no tree, but docs/mixtures.md promises exact shares.

    Args:
      weights: Integer weights of the sources; nothing is taken from a source of weight 0.
      deficit: Share minus rows of each source at the start; they sum to 0.

    Attributes:
      bound: Rows that a source may be away from its share, from an even start on.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...]) -> None:
        self._weights, self._deficit = weights, deficit
        self._paths: dict[int, list[tuple[_Split, bool]]] = {}  # splits above a source, and whether it is left of them
        self.bound = 0.0
        active = sorted((source for source, weight in enumerate(weights) if weight), key=lambda each: -weights[each])
        self._root = self._tree(active, [], Fraction(0), 0.0)

    def _tree(self, sources: list[int], path: list[tuple[_Split, bool]], distance: Fraction, rounded: float) -> _Tree:
        """Return the tree of `sources`, heaviest first, which together are `distance` (`rounded`: as a float) rows from their
        share.

        The cut is the one with the least distance of the worst source or, for many sources, with the most even halves."""
        if len(sources) == 1:
            self._paths[sources[0]] = path
            self.bound = max(self.bound, float(distance))
            return sources[0]
        weights = [self._weights[source] for source in sources]
        whole = sum(weights)
        if len(sources) <= _ALL_TRIED:
            _, cut = _best_cut([weight / whole for weight in weights], rounded)
        else:
            cut = min(range(1, len(sources)), key=lambda at: abs(2 * sum(weights[:at]) - whole))
        share = Fraction(sum(weights[:cut]), whole)
        deficits = [self._deficit[source] for source in sources]
        split = _Split(share, sum(deficits[:cut], Fraction(0)) - share * sum(deficits, Fraction(0)) + _HALF)
        part = float(share)
        left = self._tree(sources[:cut], [*path, (split, True)], _HALF + share * distance, 0.5 + part * rounded)
        right = self._tree(
            sources[cut:], [*path, (split, False)], _HALF + (1 - share) * distance, 0.5 + (1 - part) * rounded
        )
        return split, left, right

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n]), and the number of rows taken from it before."""
        sources, numbers = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        stack: list[tuple[_Tree, Ints, Ints]] = [(self._root, np.arange(len(rows)), rows)]
        while stack:
            node, at, local = stack.pop()
            if isinstance(node, int):
                sources[at], numbers[at] = node, local
            elif len(at):
                split, left_branch, right_branch = node
                before = split.lefts(local)
                left = split.lefts(local + 1) > before
                stack.append((left_branch, at[left], before[left]))
                stack.append((right_branch, at[~left], (local - before)[~left]))
        return sources, numbers

    def counts(self, row: int) -> list[int]:
        """Return the rows taken from each source before `row`."""
        found = [0] * len(self._weights)
        for source, path in self._paths.items():
            local = np.array([row], np.int64)
            for split, left in path:
                before = split.lefts(local)
                local = before if left else local - before
            found[source] = int(local[0])
        return found

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row at which `source` gives each of its rows `numbers` (int64 [n], from 0); -1 where it never does."""
        if source not in self._paths:
            return np.full(len(numbers), -1, np.int64)
        for split, left in reversed(self._paths[source]):
            numbers = split.find(numbers, left)
        return numbers


def _best_cut(weights: list[float], distance: float) -> tuple[float, int]:
    """Return the distance of the worst source in the best tree of these sources, and the cut at its root."""
    if len(weights) == 1:
        return distance, 0
    tried = []
    for cut in range(1, len(weights)):
        part = sum(weights[:cut]) / sum(weights)
        left, _ = _best_cut(weights[:cut], 0.5 + part * distance)
        right, _ = _best_cut(weights[cut:], 0.5 + (1 - part) * distance)
        tried.append((round(max(left, right), 12), cut))
    return min(tried)


def _wide(values: Ints, factor: int) -> npt.NDArray[Any]:
    """Return `values`, as Python integers if twice their product with `factor` may not fit int64."""
    highest = int(values.max(initial=0)) + 2
    return values if highest * factor * 2 < _INT64_LIMIT else values.astype(object)
