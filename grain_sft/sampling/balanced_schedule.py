"""ScheduleTable: which of several sources each row is taken from, so that none is ever a whole row away from its share.

The rule is Tijdeman's, of the chairman assignment problem (R. Tijdeman, "The chairman assignment problem", Discrete
Mathematics 32, 1980): among n sources, after every row, no source is further from its share than 1 - 1 / (2 (n - 1)), and
no rule has a smaller bound that holds for all weights. Each source's next row is due from when its share is 1 / (2 (n - 1))
ahead of its rows, and is late when it would be further ahead than the bound; of all rows that are due, the one that is
late first is taken. Taking the source that is furthest behind instead is not enough from three sources on.

Shares are fractions of one denominator D, so that without a deficit at the start the choices repeat after D rows: a table of
one period answers everything at constant time. It takes 9 bytes a row, and about a second a million rows to make.
"""

from __future__ import annotations

import functools
import heapq
import math
from fractions import Fraction

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

_INT64 = 1 << 62


class ScheduleTable:
    """Choices among sources of constant weights, from row 0 on: a table of those before they repeat, and of one period.

    Args:
      weights: Integer weights of the sources; nothing is taken from a source of weight 0. Their sum divides the period.
      deficit: Share minus rows of each source at the start; they sum to 0.
      num_rows: Bound on the rows that are asked for; None for any number.

    Attributes:
      bound: Rows that a source may be away from its share, from an even start on.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None = None) -> None:
        common = math.gcd(*weights)
        weights = tuple(weight // common for weight in weights)
        active = sum(weight > 0 for weight in weights)
        self.bound = 0.0 if active == 1 else 1 - 1 / (2 * (active - 1))
        self._weights = weights
        repeats = not any(deficit)
        choices, self._begin = _choices(weights, deficit, None if repeats else num_rows)
        self._choices = choices
        self._period = len(choices) - self._begin
        order = np.argsort(choices, kind="stable")
        self._ends: Ints = np.cumsum(np.bincount(choices, minlength=len(weights)))
        self._starts = self._ends - np.bincount(choices, minlength=len(weights))
        self._rows_by_source = order.astype(np.uint32)  # of the rows of each source, source after source
        self._ranks = np.empty(len(choices), np.uint32)  # rows of the same source before each
        self._ranks[order] = np.arange(len(choices)) - self._starts[choices[order]]
        before = [int(np.searchsorted(self._of(source), self._begin)) for source in range(len(weights))]
        self._before = np.array(before, np.int64)  # rows of each source before the period
        self._each = self._ends - self._starts - self._before  # and in it

    def _of(self, source: int) -> npt.NDArray[np.uint32]:
        return self._rows_by_source[self._starts[source] : self._ends[source]]

    @property
    def table_rows(self) -> int:
        """Rows of the table."""
        return len(self._choices)

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n]), and the number of rows taken from it before."""
        periods, at = self._folded(rows)
        sources = self._choices[at].astype(np.int64)
        return sources, self._ranks[at] + periods * self._each[sources]

    def counts(self, row: int) -> list[int]:
        """Return the rows taken from each source before `row`."""
        periods, at = (int(value[0]) for value in self._folded(np.array([row])))
        counts = [int(np.searchsorted(self._of(source), at)) for source in range(len(self._weights))]
        return [count + periods * int(each) for count, each in zip(counts, self._each, strict=True)]

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row at which `source` gives each of its rows `numbers` (int64 [n], from 0); -1 where it never does."""
        rows, before, each = self._of(source), int(self._before[source]), int(self._each[source])
        periods = np.zeros(len(numbers), np.int64)
        if each:
            periods = np.maximum(numbers - before, 0) // each
        at = numbers - periods * each
        there = at < len(rows)
        found = np.full(len(numbers), -1, np.int64)
        found[there] = rows[at[there]] + periods[there] * self._period
        return found

    def _folded(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the number of whole periods before each row, and its row in the table."""
        periods = np.maximum(rows - self._begin, 0) // self._period
        return periods, rows - periods * self._period


@functools.lru_cache(maxsize=16)
def _choices(
    weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None
) -> tuple[npt.NDArray[np.unsignedinteger], int]:
    """Return the sources in turn, uint8 or uint16, until they repeat or there are `num_rows`; and where the period begins.

    The choices depend on the rows of each source beyond its share, and on the position in the period of the weights. Where both
    recur, all that follows recurs. With a deficit at the start, the bound of even starts may be out of reach; then the bound is
    a whole row, and if that is too, the source that would exceed it first comes first.
    """
    bounds = [None, Fraction(0)] if any(deficit) else [None]
    for slack in bounds:
        queue = _Queue(weights, deficit, slack)
        begins = {tuple(0 for _ in weights): 0}
        chosen: list[int] = []
        while not queue.late or slack is bounds[-1]:
            chosen += queue.period(num_rows)
            beyond = tuple(count - weight * queue.periods for count, weight in zip(queue.counts, weights, strict=True))
            if beyond in begins or (num_rows is not None and len(chosen) >= num_rows):
                dtype = np.uint8 if len(weights) <= 1 << 8 else np.uint16
                if not queue.late or slack is bounds[-1]:
                    return np.array(chosen, dtype), begins.get(beyond, 0)
            begins[beyond] = len(chosen)
    raise AssertionError("the last bound is taken as it comes")


class _Queue:
    """Rows that wait to be taken, by the row at which they are late."""

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction | None) -> None:
        self._weights, self._rows = weights, sum(weights)
        self._active = [source for source, weight in enumerate(weights) if weight]
        self._slack = Fraction(1, 2 * max(1, len(self._active) - 1)) if slack is None else slack  # one less the bound
        self._deficit = deficit
        self._made = [0] * len(weights)  # rows of each source that wait, or waited
        self._waiting: list[int] = []  # when each row is due that was not due yet, and its key, by when it is due
        self._keys: list[int] = []
        self._passed = 0  # of these, that are due now
        self._due: list[int] = []  # keys: when late, and the source
        self.late = False  # whether a row was taken after it was late, or before it was due
        self.periods = 0
        self.counts = [0] * len(weights)

    def period(self, num_rows: int | None) -> list[int]:
        """The sources of the next `sum(weights)` rows, or of as many as are left of `num_rows`."""
        first = self.periods * self._rows
        end = first + self._rows if num_rows is None else min(first + self._rows, num_rows)
        self._make(end)
        taken = self._take(first, end)
        lasts, sources = np.divmod(np.array(taken), len(self._weights))
        self.late = self.late or bool((lasts < np.arange(first + 1, end + 1)).any())
        self.periods += 1
        for source, count in enumerate(np.bincount(sources.astype(np.int64), minlength=len(self._weights)).tolist()):
            self.counts[source] += count
        chosen: list[int] = sources.tolist()
        return chosen

    def _take(self, first: int, end: int) -> list[int]:
        """The keys of the rows that are taken after row `first`, up to row `end`."""
        due, waiting, keys, passed, taken = self._due, self._waiting, self._keys, self._passed, []
        push, pop, count = heapq.heappush, heapq.heappop, len(waiting)
        for row in range(first + 1, end + 1):
            while passed < count and waiting[passed] <= row:
                push(due, keys[passed])
                passed += 1
            if not due:  # nothing is due: what is due first
                self.late, self._passed = True, passed
                if passed == count:
                    self._make(end, extra=True)
                    waiting, keys, passed, count = self._waiting, self._keys, 0, len(self._waiting)
                push(due, keys[passed])
                passed += 1
            taken.append(pop(due))
        self._passed = passed
        return taken

    def _make(self, last: int, extra: bool = False) -> None:
        """Let all rows wait that are due by row `last` (counted from 1), and with `extra` one more of each source."""
        firsts = [np.array(self._waiting[self._passed :], np.int64)]
        keys = [np.array(self._keys[self._passed :], np.int64)]
        for source in self._active:
            share = Fraction(self._weights[source], self._rows)
            wanted = math.floor(self._deficit[source] + share * last - self._slack) + 1
            begin = self._made[source]
            stop = max(begin, wanted) + extra
            first, key = self._windows(source, begin, stop)
            firsts.append(first)
            keys.append(key)
            self._made[source] = stop
        joined, of_joined = np.concatenate(firsts), np.concatenate(keys)
        order = np.lexsort((of_joined, joined))
        self._waiting, self._keys, self._passed = joined[order].tolist(), of_joined[order].tolist(), 0

    def _windows(self, source: int, begin: int, stop: int) -> tuple[Ints, Ints]:
        """When each of some rows of a source (from 0) is due, and its key."""
        weight, number = self._weights[source], len(self._weights)
        due, late = self._slack - self._deficit[source], 1 - self._slack - self._deficit[source]
        unit = math.lcm(due.denominator, late.denominator)
        dtype = np.int64 if (stop + 3) * unit * self._rows * number < _INT64 else object
        numbers = np.arange(begin, stop).astype(dtype) * unit
        low, high = int(due * unit), int(late * unit)
        first = -((-(numbers + low) * self._rows) // (weight * unit))  # from when it is due
        last = (numbers + high) * self._rows // (weight * unit) + 1  # when it would be late
        return first.astype(np.int64), (last * number + source).astype(np.int64)
