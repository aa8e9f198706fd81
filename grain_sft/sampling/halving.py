"""HalvingTree, which computes the source of each row of a mixture.

It replaces `ScheduleTable`, a list of the sources of one period of rows, for weights whose list would be too long.
"""

import dataclasses
import math
from fractions import Fraction
from typing import TypeAlias

import numpy as np

from grain_sft.types import Array, Ints

_ALL_TRIED = 9  # with up to 9 sources, a node tries every cut of the sorted sources into two branches
_INT64_LIMIT = 1 << 62  # larger products are computed as Python integers


@dataclasses.dataclass(frozen=True)
class _Split:
    """Rule that divides the rows of a node between the left branch and the right branch.

    Of the first t rows, the left branch gets floor((share * t + offset) / unit), but at least 0 and at most t. With share 2,
    offset 3 and unit 6, the left branch gets rows 1, 4, 7, ... of the node.
    """

    share: int
    offset: int
    unit: int

    def lefts(self, rows: Ints) -> Ints:
        """Return int64 [n]: for each t in `rows` (int64 [n]), how many of the first t rows go left."""
        unclipped = np.asarray((_wide(rows, self.unit) * self.share + self.offset) // self.unit)
        lefts: Ints = np.minimum(np.maximum(unclipped, 0), rows).astype(np.int64)
        return lefts

    def find(self, numbers: Ints, left: bool) -> Ints:
        """Return int64 [n]: for each k in `numbers` (int64 [n]), the row of the node that is row k of its left or right branch.

        Rows from 2^62 - 1 on are returned as 2^62 - 1.
        """
        # Let t be the smallest number for which the branch gets k + 1 of the first t rows of the node. The result is t - 1:
        #   left:   share * t + offset >= (k + 1) * unit, so t = ceil(((k + 1) * unit - offset) / share)
        #   right:  share * t + offset < (t - k) * unit, so t = floor((k * unit + offset) / (unit - share)) + 1
        scaled = _wide(numbers, self.unit) * self.unit
        if left:
            num_rows = -((self.offset - self.unit - scaled) // self.share)
        else:
            num_rows = (scaled + self.offset) // (self.unit - self.share) + 1
        # These formulas ignore that a branch gets at most t of t rows. The next line adds the condition t >= k + 1.
        rows: Ints = np.maximum(np.minimum(num_rows, _INT64_LIMIT), numbers + 1).astype(np.int64) - 1
        return rows


_Tree: TypeAlias = "int | tuple[_Split, _Tree, _Tree]"  # int: a source


class HalvingTree:
    """Tree whose leaves are the sources of a mixture with constant weights.

    Each node divides the rows that reach it between two branches: of the first t rows, the left branch gets its share of t,
    rounded. Example: the sources A, B and C have the weights 3, 2 and 1. The first node sends 5/6 of the rows to the left, to
    the second node, and the others to C. The second node sends 3/5 of its rows to A, and the others to B:

      row of the mixture       0     1     2     3     4     5
      first node               left  left  left  C     left  left
      row of the second node   0     1     2           3     4
      second node              A     B     A           B     A

    The distance of a source is the number of rows by which it differs from its share. A branch inherits its share of the node's
    distance, and the rounding adds up to half a row: if a node is up to 0.5 rows off, a branch with half of its rows is up to
    0.25 + 0.5 rows off. `bound` is the distance of the worst source: at most 1 row for up to 4 sources, and less than
    2 rows for any number of sources.

    Args:
      weights: Integer weights of the sources; nothing is taken from a source of weight 0.
      deficit: Deficit of each source before row 0 of the tree: its share of earlier rows minus the rows that it gave.

    Attributes:
      bound: Maximum number of rows by which a source may differ from its share, if all deficits are 0.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...]) -> None:
        self._weights, self._deficit = weights, deficit
        # for each source, pairs from the root to the source: a split, and whether the source is in its left branch
        self._paths: dict[int, list[tuple[_Split, bool]]] = {}
        self.bound = 0.0
        sources = [source for source, weight in enumerate(weights) if weight]
        self._root = self._tree(sorted(sources, key=lambda source: -weights[source]), [], 0.0)  # the heaviest first

    def _tree(self, sources: list[int], path: list[tuple[_Split, bool]], distance: float) -> _Tree:
        """Return the tree of `sources`, which are sorted, the heaviest first.

        `path` is the path from the root to this tree, as in `_paths`. `distance` is the number of rows by which the sources
        together may differ from their share.
        """
        if len(sources) == 1:
            self._paths[sources[0]] = path
            self.bound = max(self.bound, round(distance, 12))
            return sources[0]
        weights = [self._weights[source] for source in sources]
        total = sum(weights)
        if len(sources) <= _ALL_TRIED:
            _, cut = _best_cut([weight / total for weight in weights], distance)
        else:
            # the cut that divides the weight most evenly, because trying all trees takes too long
            cut = min(range(1, len(sources)), key=lambda number: abs(2 * sum(weights[:number]) - total))
        share = Fraction(sum(weights[:cut]), total)
        deficits = [self._deficit[source] for source in sources]
        # The nodes above make up for the deficit of `sources` together: they send more rows here, and the left branch gets its
        # share of these. So the offset adds only what the branch lacks beyond that. With the 1/2, `_Split` rounds to the
        # nearest integer.
        offset = Fraction(1, 2) + sum(deficits[:cut]) - share * sum(deficits)
        unit = math.lcm(share.denominator, offset.denominator)
        split = _Split(int(share * unit), int(offset * unit), unit)
        left_share = float(share)
        left = self._tree(sources[:cut], [*path, (split, True)], 0.5 + left_share * distance)
        right = self._tree(sources[cut:], [*path, (split, False)], 0.5 + (1 - left_share) * distance)
        return split, left, right

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n]), and the number of earlier rows of that source, int64 [n]."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        # (node, entries, node_rows): the rows `rows[entries]` are rows `node_rows` of `node`. A recursive
        # function would refer to itself, and so keep the arrays until a garbage collection.
        stack: list[tuple[_Tree, Ints, Ints]] = [(self._root, np.arange(len(rows)), rows)]
        while stack:
            node, entries, node_rows = stack.pop()
            if isinstance(node, int):
                sources[entries], numbers[entries] = node, node_rows
            elif len(entries):
                split, left_branch, right_branch = node
                left_before = split.lefts(node_rows)
                left = split.lefts(node_rows + 1) > left_before
                stack.append((left_branch, entries[left], left_before[left]))
                stack.append((right_branch, entries[~left], (node_rows - left_before)[~left]))
        return sources, numbers

    def counts(self, row: int) -> list[int]:
        """Return the number of rows of each source before `row`."""
        counts = [0] * len(self._weights)
        for source, path in self._paths.items():
            num_rows = np.array([row], np.int64)  # number of rows that reach the node
            for split, is_left in path:
                lefts = split.lefts(num_rows)
                num_rows = lefts if is_left else num_rows - lefts
            counts[source] = int(num_rows[0])
        return counts

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row of the mixture that is row k of `source`, for each k in `numbers`. Both are int64 [n].

        The result is -1 if the weight of the source is 0. Rows from 2^62 - 1 on are returned as 2^62 - 1.
        """
        if source not in self._paths:
            return np.full(len(numbers), -1, np.int64)
        for split, left in reversed(self._paths[source]):
            numbers = split.find(numbers, left)
        return numbers


def _best_cut(weights: list[float], distance: float) -> tuple[float, int]:
    """Return the distance of the worst source in the best tree, and the number of sources in the left branch of its root.

    The best tree is the tree whose worst source has the smallest distance.
    """
    if len(weights) == 1:
        return distance, 0
    cuts = []
    for cut in range(1, len(weights)):
        left_share = sum(weights[:cut]) / sum(weights)
        left, _ = _best_cut(weights[:cut], 0.5 + left_share * distance)
        right, _ = _best_cut(weights[cut:], 0.5 + (1 - left_share) * distance)
        cuts.append((round(max(left, right), 12), cut))  # rounded, so that equal distances are a tie on every machine
    return min(cuts)


def _wide(values: Ints, factor: int) -> Array:
    """Return `values`, converted to Python integers if their products with `factor` may exceed int64."""
    highest = int(values.max(initial=0)) + 2  # 2 more, and `* 2` below: room for the terms that callers add
    return values if highest * factor * 2 < _INT64_LIMIT else values.astype(object)
