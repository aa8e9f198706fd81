"""Table of the sources of a mixture's rows. No source is ever a whole row away from its share.

In proportion to its weight, a source is entitled to share(t) of the first t rows of the mixture. With weights 2 and 1, share(t)
of the first source is 2t/3. The deficit of a source is its share so far minus the rows that it gave.

The rule is that of R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980. The rule fills the mixture
row by row, and each time takes one row of a source. Each row of a source has a due row and a deadline, both row numbers of the
mixture. It can be taken from the due row on, and has to be taken by the deadline. Of the rows that are due, the rule takes the
row with the earliest deadline. The rule keeps each source within 1 - slack rows of its share. With n sources, the slack is
1 / (2 (n - 1)). No rule has a smaller bound for all weights. For row k of a source, k >= 0:

- The row is due at the first row r of the mixture with share(r + 1) - k >= slack.
- The deadline is the last row r of the mixture with share(r) - k <= 1 - slack.

Example: the sources A, B and C have the weights 3, 2 and 1, so the slack is 1/4. "B0 2" means row 0 of B, with deadline 2:

  row of the mixture   due and not yet taken   taken
  0                    A0 1, B0 2              A0
  1                    B0 2, C0 4              B0
  2                    A1 3, C0 4              A1
  3                    C0 4, B1 5              C0
  4                    A2 5, B1 5              A2: of equal deadlines, the first source
  5                    B1 5                    B1; from row 6 on, the sources repeat
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from grain_sft.types import Ints, UnsignedInts

_BLOCK_ROWS = 1 << 12  # rows that `_due_rows` computes at once
_PROBED_ROWS = 1 << 10  # number of rows in which `_slack` looks for rows that are taken too early or too late


class ScheduleTable:
    """Table of the source of each row, for constant weights.

    From some row on, the sources repeat with a period. The table has the rows before the first period, and one period.
    Without a deficit at the start, the first period begins at row 0, and has as many rows as the sum of the weights. A row
    takes 9 bytes of memory.

    Args:
      weights: Integer weights of the sources, without a common divisor. A source of weight 0 gives no rows.
      deficit: Deficit of each source before row 0, left by rows with earlier weights. The deficits sum to 0.
      num_rows: Number of rows with these weights; None for no limit. The results for later rows have no meaning.

    Attributes:
      bound: Maximum number of rows by which a source can differ from its share, if no source has a deficit at the start.
    """

    def __init__(self, weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None = None) -> None:
        num_active = len(weights) - weights.count(0)
        self.bound = 0.0 if num_active == 1 else 1 - 1 / (2 * (num_active - 1))
        # Without a deficit, the table ends after one period of sum(weights) rows. If `num_rows` includes it, all mixtures with
        # these weights share one cached table.
        is_whole = num_rows is None or (num_rows >= sum(weights) and not any(deficit))
        self._sources, self._begin = _table(weights, deficit, None if is_whole else num_rows)
        self._period = len(self._sources) - self._begin
        # number of rows of each source before the first period, and in one period
        self._before = np.bincount(self._sources[: self._begin], minlength=len(weights))
        self._per_period = np.bincount(self._sources[self._begin :], minlength=len(weights))
        by_source = np.argsort(self._sources, kind="stable").astype(np.uint32)
        self._rows = np.split(by_source, np.cumsum(self._before + self._per_period)[:-1])
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
        return [int(count) for count in in_table + periods * self._per_period]

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return the row of the mixture that is row k of `source`, for each k in `numbers`. Both are int64 [n].

        The result is -1 if the source has no row k.
        """
        rows, per_period = self._rows[source], int(self._per_period[source])
        # `per_period` is 0 for a source that has no rows in a period
        periods = np.maximum(numbers - int(self._before[source]), 0) // max(1, per_period)
        numbers_in_table = numbers - periods * per_period
        exists = numbers_in_table < len(rows)
        rows_of_mixture = np.full(len(numbers), -1, np.int64)
        rows_of_mixture[exists] = rows[numbers_in_table[exists]] + periods[exists] * self._period
        return rows_of_mixture


@functools.lru_cache(maxsize=16)
def _table(weights: tuple[int, ...], deficit: tuple[Fraction, ...], num_rows: int | None) -> tuple[UnsignedInts, int]:
    """Return the sources of the rows up to the end of the first period, and the row at which this period begins.

    If this period does not end within `num_rows` rows, return the sources of `num_rows` rows, and 0.
    """
    choices = _choices(weights, deficit, _slack(weights, deficit))
    sources: list[int] = []
    # In sum(weights) rows, the deficit of a source changes by its weight minus the rows that it gave. Once all deficits equal
    # those at an earlier row, the sources from that row on repeat.
    change = np.zeros(len(weights), np.int64)
    row_of_change: dict[bytes, int] = {}
    while change.tobytes() not in row_of_change and len(sources) != num_rows:
        row_of_change[change.tobytes()] = len(sources)
        count = sum(weights) if num_rows is None else min(sum(weights), num_rows - len(sources))
        chosen = [source for source, _ in itertools.islice(choices, count)]
        sources += chosen
        # if `num_rows` ends this pass early, `change` sums to more than 0, so it equals no earlier one
        change = change + weights - np.bincount(chosen, minlength=len(weights))
    return np.array(sources, np.min_scalar_type(len(weights) - 1)), row_of_change.get(change.tobytes(), 0)


def _slack(weights: tuple[int, ...], deficit: tuple[Fraction, ...]) -> Fraction:
    """Return the slack of the rule: 1 / (2 (n - 1)), or 0 if rows would be early or late with that slack.

    An early row is taken before it is due, and a late row after its deadline. Both happen only if some source has a deficit at
    the start.
    """
    slack = Fraction(1, 2 * max(1, len(weights) - weights.count(0) - 1))
    if not any(deficit):
        return slack
    probed = itertools.islice(_choices(weights, deficit, slack), _PROBED_ROWS)
    return slack if all(in_time for _, in_time in probed) else Fraction(0)


def _choices(weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction) -> Iterator[tuple[int, bool]]:
    """Yield, for each row of the mixture, the source, and whether the source's row is due and meets its deadline.

    If no row is due, the row that becomes due next is taken early. This happens only if some source has a deficit at the start.
    """
    upcoming = _due_rows(weights, deficit, slack)
    due_row, key = next(upcoming)
    ready: list[int] = []  # heap of the keys of the rows that are due and not taken; the earliest deadline comes first
    for row in itertools.count():
        is_due = bool(ready) or due_row <= row
        while due_row <= row or not ready:
            heapq.heappush(ready, key)
            due_row, key = next(upcoming)
        deadline, source = divmod(heapq.heappop(ready), len(weights))
        yield source, is_due and row <= deadline


def _due_rows(weights: tuple[int, ...], deficit: tuple[Fraction, ...], slack: Fraction) -> Iterator[tuple[int, int]]:
    """Yield (due row, key) for each row of each source, earliest due row first.

    For deadline 70 and source 2 of 5, the key is 70 * 5 + 2. The pairs are computed in arrays, so a table of a million rows
    takes 0.5 s instead of 1.2 s.
    """
    num_sources, total = len(weights), sum(weights)
    active = np.flatnonzero(weights)
    weight_of = np.array(weights)
    # A deficit at the start adds to the share: row k is due at the first row r with share(r + 1) + deficit >= k + slack. That
    # is weight * (r + 1) >= k * total + (slack - deficit) * total. The last term can be rounded up: the others are integers.
    to_due = np.array([math.ceil((slack - value) * total) for value in deficit])
    # In the same way, the deadline is the last row r with weight * r <= k * total + (1 - slack - deficit) * total.
    to_deadline = np.array([math.floor((1 - slack - value) * total) for value in deficit])
    begins = np.zeros(len(active), np.int64)
    for end_row in itertools.count(_BLOCK_ROWS, _BLOCK_ROWS):
        # rows `begins` to `ends - 1` of each source become due in this block, which ends before row `end_row`
        ends = np.maximum((weight_of[active] * end_row - to_due[active]) // total + 1, 0)
        sources = np.repeat(active, ends - begins)
        numbers = np.concatenate([np.arange(begin, end) for begin, end in zip(begins, ends, strict=True)])
        due_rows = -(-(numbers * total + to_due[sources]) // weight_of[sources]) - 1
        deadlines = (numbers * total + to_deadline[sources]) // weight_of[sources]
        keys = deadlines * num_sources + sources
        order = np.lexsort((keys, due_rows))
        yield from zip(due_rows[order].tolist(), keys[order].tolist(), strict=True)
        begins = ends
