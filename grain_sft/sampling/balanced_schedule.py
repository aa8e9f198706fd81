"""ScheduleTable: the source of each row of a mixture, chosen so that no source is ever a whole row away from its share."""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from grain_sft.types import Ints

_INT64_LIMIT = 1 << 62  # larger products are computed as Python integers
_PROBED_ROWS = 1 << 10  # if a deficit at the start makes the rule late, it does so within this number of rows

Sources = npt.NDArray[np.unsignedinteger]


class ScheduleTable:
    """Table of the source of each row, for constant weights. The sources repeat, so the table ends with one period.

    The rule is that of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. With n sources, no source
    is ever further from its share than 1 - 1 / (2 (n - 1)) rows. No rule has a smaller bound for all weights.

    The deficit of a source is its share of the rows so far minus its rows. The source's next row is due once the deficit is
    1 / (2 (n - 1)), and late once the deficit exceeds the bound. Of all rows that are due, the rule takes the one that becomes
    late first. With three sources or more, taking the source with the largest deficit would not keep the bound.

    Without a deficit at the start, the period is the sum of the weights. A row of the table takes 9 bytes, and a million rows
    take about a second to make.

    Args:
      weights: Integer weights of the sources; nothing is taken from a source of weight 0.
      deficit: Deficit of each source before row 0; they sum to 0.
      num_rows: Number of rows that will be chosen; None for no bound.

    Attributes:
      bound: Most rows by which a source may differ from its share, if there is no deficit at the start.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None = None) -> None:
        num_active = len(weights) - weights.count(0)
        self.bound = 0.0 if num_active == 1 else 1 - 1 / (2 * (num_active - 1))
        divisor = math.gcd(*weights)
        weights = tuple(weight // divisor for weight in weights)
        self._sources, self._begin = _table(weights, deficit, num_rows if any(deficit) else None)
        self._period = len(self._sources) - self._begin
        # rows of each source before the first period, and in one period
        self._before = np.bincount(self._sources[: self._begin], minlength=len(weights))
        self._per_period = np.bincount(self._sources[self._begin :], minlength=len(weights))
        order = np.argsort(self._sources, kind="stable").astype(np.uint32)
        self._rows = np.split(
            order, np.cumsum(self._before + self._per_period)[:-1]
        )  # rows of the table of each source
        self._ranks = np.empty(len(self._sources), np.uint32)  # for each row, number of earlier rows of the same source
        for rows in self._rows:
            self._ranks[rows] = np.arange(len(rows))

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n]), and the number of earlier rows of that source, int64 [n]."""
        periods = np.maximum(rows - self._begin, 0) // self._period
        rows_of_table = rows - periods * self._period
        sources = self._sources[rows_of_table].astype(np.int64)
        return sources, self._ranks[rows_of_table] + periods * self._per_period[sources]

    def counts(self, row: int) -> list[int]:
        """Return the number of rows of each source before `row`."""
        periods = max(row - self._begin, 0) // self._period
        row_of_table = row - periods * self._period
        in_table = np.array([np.searchsorted(rows, row_of_table) for rows in self._rows])
        counts: list[int] = (in_table + periods * self._per_period).tolist()
        return counts

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row that is each of the rows `numbers` of `source` (int64 [n], from 0); -1 where the source has fewer."""
        rows, per_period = self._rows[source], int(self._per_period[source])
        periods = np.zeros_like(numbers)
        if per_period:
            periods = np.maximum(numbers - int(self._before[source]), 0) // per_period
        numbers_in_table = numbers - periods * per_period
        exists = numbers_in_table < len(rows)
        found = np.full(len(numbers), -1, np.int64)
        found[exists] = rows[numbers_in_table[exists]] + periods[exists] * self._period
        return found


@functools.lru_cache(maxsize=16)
def _table(weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None) -> tuple[Sources, int]:
    """Return the sources of the rows until they repeat or `num_rows` are chosen, and the row at which the period begins.

    The rule does not depend on `num_rows`, so rows before a change of weights do not depend on the change.
    """
    slack = _slack(weights, deficit)
    ahead = np.zeros(len(weights), np.int64)  # rows of each source minus its share; if they recur, so do the sources
    begins: dict[bytes, int] = {}
    parts: list[Sources] = []
    num_chosen = 0
    for sources, _ in _chosen(weights, deficit, slack, num_rows):
        begins[ahead.tobytes()] = num_chosen
        parts.append(sources.astype(np.min_scalar_type(len(weights) - 1)))
        num_chosen += len(sources)
        ahead = ahead + np.bincount(sources, minlength=len(weights)) - weights
        if ahead.tobytes() in begins or num_chosen == num_rows:
            break
    return np.concatenate(parts), begins.get(ahead.tobytes(), 0)


def _slack(weights: tuple[int, ...], deficit: tuple[Fraction, ...]) -> Fraction:
    """Return the slack: a row is due at this deficit, and late at a deficit above 1 minus the slack.

    It is 1 / (2 (n - 1)), as `ScheduleTable` says, unless a deficit at the start makes rows late. Then it is 0: a row is late
    once its source lacks more than a whole row. If rows are late even so, those that become late first are taken first.
    """
    slack = Fraction(1, 2 * max(1, len(weights) - weights.count(0) - 1))
    if not any(deficit):
        return slack
    num_probed = 0
    for sources, in_time in _chosen(weights, deficit, slack, _PROBED_ROWS):
        if not in_time:
            return Fraction(0)
        num_probed += len(sources)
        if num_probed == _PROBED_ROWS:
            break
    return slack


def _chosen(
    weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction, num_rows: int | None
) -> Iterator[tuple[Ints, bool]]:
    """Yield the sources of the next `sum(weights)` rows, again and again, until `num_rows` are chosen; None means no end.

    Each part has a bool: whether each row was taken after it was due and before it was late.
    """
    period = sum(weights)
    heap: list[int] = []  # keys of the rows that are due and not taken
    passed = np.zeros(len(weights), np.int64)  # rows of each source that were due so far, taken or not
    for first in itertools.count(0, period):
        end = first + period if num_rows is None else min(first + period, num_rows)
        dues, keys = _due_rows(weights, deficit, slack, passed, end)
        num_due = 0
        taken = []
        in_time = True
        for row in range(first + 1, end + 1):
            while dues[num_due] <= row:
                heapq.heappush(heap, keys[num_due])
                num_due += 1
            if not heap:  # no row is due: take the next one that will be
                in_time = False
                heapq.heappush(heap, keys[num_due])
                num_due += 1
            taken.append(heapq.heappop(heap))
        passed += np.bincount(np.array(keys[:num_due], np.int64) % len(weights), minlength=len(weights))
        last_rows, sources = np.divmod(np.array(taken, np.int64), len(weights))
        yield sources, in_time and bool((last_rows >= np.arange(first + 1, end + 1)).all())


def _due_rows(
    weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction, passed: Ints, end: int
) -> tuple[list[int], list[int]]:
    """Return when rows of the sources are due, ascending, and their keys. Rows of the mixture count from 1 here.

    The key of a row of source s that becomes late after row r is r * len(weights) + s, so keys are in the order in which rows
    become late. The rows are those from row `passed` of each source on that are due by row `end`, and some later ones: where
    sources of weight 0 lack rows, the others are taken before they are due.
    """
    number, period = len(weights), sum(weights)
    num_more = int(sum(map(abs, deficit))) + 3
    parts = []
    for source in np.flatnonzero(weights).tolist():
        weight = weights[source]
        due, late = slack - deficit[source], 1 - slack - deficit[source]  # deficits, without that at the start
        begin = int(passed[source])
        stop = max(begin, math.floor(Fraction(weight * end, period) - due) + 1) + num_more
        # Row k of the source is due at the first row t with share(t) >= k + due, and late after the last row t with
        # share(t - 1) <= k + late, where share(t) = weight * t / period.
        unit = math.lcm(due.denominator, late.denominator)
        dtype = np.int64 if (stop + 3) * unit * period * number < _INT64_LIMIT else object
        scaled = np.arange(begin, stop).astype(dtype) * unit
        due_rows = -((-(scaled + int(due * unit)) * period) // (weight * unit))
        last_rows = (scaled + int(late * unit)) * period // (weight * unit) + 1
        parts.append((due_rows.astype(np.int64), (last_rows * number + source).astype(np.int64)))
    dues, keys = np.concatenate(parts, axis=1)
    order = np.lexsort((keys, dues))
    return dues[order].tolist(), keys[order].tolist()
