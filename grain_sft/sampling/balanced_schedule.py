"""ScheduleTable: the source of each row of a mixture, chosen so that no source is ever a whole row away from its share."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from grain_sft.sampling.orders import Ints

_INT64_LIMIT = 1 << 62  # larger products are computed as Python integers
_PROBED_ROWS = 1 << 10  # rows after a deficit at the start; if any row of the rule is late, one of these is

Choices = npt.NDArray[np.unsignedinteger]


class ScheduleTable:
    """Sources of the rows of constant weights, from row 0 on: a table of the rows before the sources repeat, and of one period.

    The rule is that of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. Among n sources, after
    every row, no source is further from its share than 1 - 1 / (2 (n - 1)) rows. No rule has a smaller bound for all weights.
    A source's next row is due once its share is 1 / (2 (n - 1)) ahead of its rows, and late once that lead exceeds the bound.
    Of all rows that are due, the rule takes the one that becomes late first. With three sources or more, taking the source that
    is furthest behind would not keep the bound.

    Shares are fractions of one denominator D. Without a deficit at the start, the sources repeat after D rows. A row takes 9
    bytes, and a million rows take about a second to make.

    Args:
      weights: Integer weights of the sources; nothing is taken from a source of weight 0. Their sum divides the period.
      deficit: Share minus rows of each source at the start; they sum to 0.
      num_rows: Upper bound of row numbers; None for no bound.

    Attributes:
      bound: Rows that a source may be away from its share, from an even start on.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None = None) -> None:
        common, number, active = math.gcd(*weights), len(weights), len(weights) - weights.count(0)
        self.bound = 0.0 if active == 1 else 1 - 1 / (2 * (active - 1))
        weights = tuple(weight // common for weight in weights)
        self._choices, self._begin = _choices(weights, deficit, num_rows if any(deficit) else None)
        self._period = len(self._choices) - self._begin
        self._before = np.bincount(self._choices[: self._begin], minlength=number)  # rows of each before the period
        self._each = np.bincount(self._choices[self._begin :], minlength=number)  # and in it
        order = np.argsort(self._choices, kind="stable").astype(np.uint32)
        self._rows = np.split(order, np.cumsum(self._before + self._each)[:-1])  # of each source
        self._ranks = np.empty(len(self._choices), np.uint32)  # rows of the same source before each
        for rows in self._rows:
            self._ranks[rows] = np.arange(len(rows))

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n]), and the number of rows taken from it before."""
        periods = np.maximum(rows - self._begin, 0) // self._period
        at = rows - periods * self._period
        sources = self._choices[at].astype(np.int64)
        return sources, self._ranks[at] + periods * self._each[sources]

    def counts(self, row: int) -> list[int]:
        """Return the rows taken from each source before `row`."""
        periods = max(row - self._begin, 0) // self._period
        at = row - periods * self._period
        pairs = zip(self._rows, self._each.tolist(), strict=True)
        return [int(np.searchsorted(rows, at)) + periods * each for rows, each in pairs]

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row at which `source` gives each of its rows `numbers` (int64 [n], from 0); -1 where it never does."""
        rows, before, each = self._rows[source], int(self._before[source]), int(self._each[source])
        periods = np.maximum(numbers - before, 0) // each if each else np.zeros(len(numbers), np.int64)
        at = numbers - periods * each
        there = at < len(rows)
        found = np.full(len(numbers), -1, np.int64)
        found[there] = rows[at[there]] + periods[there] * self._period
        return found


@functools.lru_cache(maxsize=16)
def _choices(weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None) -> tuple[Choices, int]:
    """Return the sources of the rows until they repeat or `num_rows` are chosen, and the row at which the period begins.

    The rule does not depend on `num_rows`, so rows before a change of weights do not depend on the change.
    """
    slack = _slack(weights, deficit)
    beyond = np.zeros(len(weights), np.int64)  # rows of each source beyond its share; if they recur, so do the sources
    begins: dict[bytes, int] = {}
    chosen: list[Choices] = []
    rows = 0
    for sources, _ in _periods(weights, deficit, slack, num_rows):
        begins[beyond.tobytes()] = rows
        chosen.append(sources.astype(np.min_scalar_type(len(weights) - 1)))
        rows += len(sources)
        beyond = beyond + np.bincount(sources, minlength=len(weights)) - weights
        if beyond.tobytes() in begins or rows == num_rows:
            break
    return np.concatenate(chosen), begins.get(beyond.tobytes(), 0)


def _slack(weights: tuple[int, ...], deficit: tuple[Fraction, ...]) -> Fraction:
    """Return 1 minus the bound: that of `ScheduleTable` or, if a deficit at the start makes it impossible, a whole row.

    If a whole row is impossible too, the source that would exceed it first comes first."""
    tight, rows = Fraction(1, 2 * max(1, len(weights) - weights.count(0) - 1)), 0
    for sources, kept in _periods(weights, deficit, tight, _PROBED_ROWS) if any(deficit) else ():
        rows += len(sources)
        if not kept:
            return Fraction(0)
        if rows == _PROBED_ROWS:
            break
    return tight


def _periods(
    weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction, num_rows: int | None
) -> Iterator[tuple[Ints, bool]]:
    """Yield the sources of the next `sum(weights)` rows, or of the rest of `num_rows`, and whether the rule took each row after
    it was due and before it was late."""
    push, pop, number, period = heapq.heappush, heapq.heappop, len(weights), sum(weights)
    due: list[int] = []  # keys of rows that are due and not taken
    passed = np.zeros(number, np.int64)  # rows of each source that were due so far, taken or not
    for first in itertools.count(0, period):
        end = first + period if num_rows is None else min(first + period, num_rows)
        begins, keys = _waiting(weights, deficit, slack, passed, end)
        count, taken, kept = 0, [], True
        for row in range(first + 1, end + 1):
            while begins[count] <= row:
                push(due, keys[count])
                count += 1
            if not due:  # take what is due first
                kept = False
                push(due, keys[count])
                count += 1
            taken.append(pop(due))
        passed += np.bincount(np.array(keys[:count], np.int64) % number, minlength=number)
        lasts, sources = np.divmod(np.array(taken, np.int64), number)
        yield sources, kept and bool((lasts >= np.arange(first + 1, end + 1)).all())


def _waiting(
    weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction, passed: Ints, end: int
) -> tuple[list[int], list[int]]:
    """Return two lists, sorted by the first: where in the mixture each row of a source is due, counted from 1; and its key,
    `last * len(weights) + source`, where it is late after `last`.

    The rows of each source begin with row `passed`. They are the rows that are due by `end`, and enough later ones, because
    rows are taken before they are due where sources of weight 0 lack rows.
    """
    number, period, spare = len(weights), sum(weights), int(sum(map(abs, deficit))) + 3
    firsts, keys = [], []
    for source in np.flatnonzero(weights).tolist():
        weight, due, late = weights[source], slack - deficit[source], 1 - slack - deficit[source]
        begin = int(passed[source])
        stop = max(begin, math.floor(Fraction(weight * end, period) - due) + 1) + spare
        unit = math.lcm(due.denominator, late.denominator)
        dtype = np.int64 if (stop + 3) * unit * period * number < _INT64_LIMIT else object
        numbers = np.arange(begin, stop).astype(dtype) * unit
        first = -((-(numbers + int(due * unit)) * period) // (weight * unit))
        last = (numbers + int(late * unit)) * period // (weight * unit) + 1
        firsts.append(first.astype(np.int64))
        keys.append((last * number + source).astype(np.int64))
    begins, of_begins = np.concatenate(firsts), np.concatenate(keys)
    order = np.lexsort((of_begins, begins))
    return begins[order].tolist(), of_begins[order].tolist()
