"""Proportions: the source of each row of a mixture, and the number of earlier rows of that source."""

import contextlib
import math
import numbers
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.layout import groups
from grain_sft.sampling.balanced_schedule import ScheduleTable
from grain_sft.sampling.batch_sizes import MOST_ROWS
from grain_sft.sampling.halving import HalvingTree
from grain_sft.types import Ints

Shares = tuple[Fraction, ...]
OnExhausted = Literal["repeat", "stop", "renormalize", "fail"]

TABLE_ROWS = 1 << 22
"""Highest sum of integer weights for a `ScheduleTable`. The memory of a table grows with the sum. With a higher sum, a
`HalvingTree` is used."""


class _Phase(NamedTuple):
    """Consecutive rows of a mixture, between two changes of its weights."""

    row: int  # first row of the phase
    counts: tuple[int, ...]  # number of rows of each source before `row`
    chooser: ScheduleTable | HalvingTree  # gives the source of each row, counted from `row` on


class Proportions:
    """The source of each row of a mixture, in proportion to the shares: a pure function of the row, in constant time.

    Constant weights are converted to integers: 0.7 and 0.3 to 7 and 3. If these sum to at most `TABLE_ROWS`, each source is
    always less than one row from its share (`ScheduleTable`). With other weights, such as 0.123456789, each source is less than
    two rows from its share (`HalvingTree`).

    Weights may change at some rows. Rows before a change do not depend on the change. The deficit of a source is its share of
    all rows so far minus its rows. Rows after a change make up for the deficits, but a source of weight 0 gets no row. In a
    mixture of up to three sources whose weights all have a `ScheduleTable`, each source stays within one row of its share after
    a change. With more sources, no rule can promise that. Example: four sources have equal weights, and after each row, the
    weight of the source that gave it becomes 0. After three rows, the source that has no row is 1/4 + 1/3 + 1/2 rows behind its
    share.

    Args:
      changes: Pairs (row, shares from that row on). The shares sum to 1, and the first row is 0.
      limits: Number of rows of each source; None for a source without an end.
      on_exhausted: What happens when a source has no row left, as in `Mixture`: one value for each source. If `on_exhausted` is
        empty, sources never end, and `limits` are ignored.

    Attributes:
      length: Number of rows of the mixture; None if it never ends, or ends in a failure.
      failure: Pair (row, source): the first row at which the mixture needs another row of an exhausted source with "fail", and
        this source's index. None if no source fails.
    """

    def __init__(
        self, changes: Sequence[tuple[int, Shares]], limits: Sequence[int | None], on_exhausted: Sequence[OnExhausted] = ()
    ) -> None:
        self._changes, self._limits, self._on_exhausted = list(changes), list(limits), list(on_exhausted)
        self._phases: list[_Phase] = []
        self.length: int | None = None
        self.failure: tuple[int, int] | None = None
        row, counts, deficit = 0, (0,) * len(limits), (Fraction(0),) * len(limits)
        # Each pass adds the phase that begins at `row`, and finds its end: the next change of weights, or the row at which a
        # source is exhausted.
        while True:
            weights = self._weights(row, counts)
            if weights is None:
                self.length = row
                break
            end = next((change for change, _ in self._changes if change > row), None)
            has_table = sum(weights) <= TABLE_ROWS
            most = (MOST_ROWS if end is None else end) - row
            # First try a table up to the row at which a source is probably exhausted. If no source is exhausted there, make the
            # table of the whole phase, which ends with its first period at the latest.
            for num_rows in sorted({most, min(most, self._probable_rows(weights, counts))}):
                chooser = ScheduleTable(weights, deficit, num_rows) if has_table else HalvingTree(weights, deficit)
                phase = _Phase(row, counts, chooser)
                exhausted = self._first_exhausted(phase)
                if exhausted is not None and exhausted[0] < row + num_rows:
                    break
            self._phases.append(phase)
            if exhausted is not None and (end is None or exhausted[0] < end):
                end, source = exhausted
                if self._on_exhausted[source] == "stop":
                    self.length = end
                    break
                if self._on_exhausted[source] == "fail":
                    self.failure = exhausted
                    break
            if end is None:
                break
            num_rows, given = end - row, chooser.counts(end - row)
            shares = [Fraction(weight * num_rows, sum(weights)) for weight in weights]  # in rows of this phase
            deficit = tuple(lack + share - count for lack, share, count in zip(deficit, shares, given, strict=True))
            row, counts = end, tuple(map(sum, zip(counts, given, strict=True)))
        if not self._phases:  # no source has a row: the methods still need a phase
            self._phases.append(_Phase(0, counts, ScheduleTable((1,) * len(limits), deficit)))
        # first row that the mixture does not have; None without an end
        self._end = self.length if self.failure is None else self.failure[0]
        self._first_rows = [phase.row for phase in self._phases]
        self._counts = np.array([phase.counts for phase in self._phases], np.int64)

    def _weights(self, row: int, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the weights from `row` on, as integers without a common divisor; None if no source is left."""
        shares = list([shares for change, shares in self._changes if change <= row][-1])
        for source, on_exhausted in enumerate(self._on_exhausted):
            if on_exhausted == "renormalize" and counts[source] == self._limits[source]:
                shares[source] = Fraction(0)
        denominator = math.lcm(*(share.denominator for share in shares))
        weights = [int(share * denominator) for share in shares]
        divisor = math.gcd(*weights)
        return tuple(weight // divisor for weight in weights) if divisor else None

    def _probable_rows(self, weights: tuple[int, ...], counts: Sequence[int]) -> int:
        """Return the number of rows with these weights in which a source is probably exhausted; MOST_ROWS if none ends.

        A table of these rows is enough. With 16 sources of 4,000 rows each and weights of 6 digits, the tables take 0.05 s
        instead of 2.7 s.
        """
        # "+ 2" rows below: a source may be up to two rows behind its share
        sources = zip(self._limits, counts, weights, strict=True) if self._on_exhausted else ()
        ending = ((limit - count, weight) for limit, count, weight in sources if limit is not None and weight)
        return min(((num_left + 2) * sum(weights) // weight for num_left, weight in ending), default=MOST_ROWS)

    def _first_exhausted(self, phase: _Phase) -> tuple[int, int] | None:
        """Return the first row of the mixture at which a source is exhausted, and the source; None if no source is exhausted.

        With "renormalize", this is the row of the mixture after the source's last row. Otherwise, it is the first row of the
        mixture that needs a row which the source does not have. If several sources are exhausted at one row, a source with
        "renormalize" comes first: the mixture goes on without this source.
        """
        exhausted = []
        for source, on_exhausted in enumerate(self._on_exhausted):
            limit, after_last = self._limits[source], int(on_exhausted == "renormalize")
            if limit is None:
                continue
            first_missing = limit - phase.counts[source]  # counts from the source's first row in this phase
            number = first_missing - after_last  # with "renormalize", the last row that the source has
            if number < 0:  # a source with "renormalize" that was exhausted before this phase
                continue
            row = int(phase.chooser.find(source, np.array([number]))[0])
            # `find` returns -1 for a row that does not exist. `HalvingTree.find` returns MOST_ROWS - 1 for all later rows, too.
            if 0 <= row < MOST_ROWS - 1:
                exhausted.append((phase.row + row + after_last, -after_last, source))
        if not exhausted:
            return None
        row, _, source = min(exhausted)
        return row, source

    @property
    def bound(self) -> float | None:
        """Maximum number of rows by which a source may differ from its share; None if weights change."""
        return self._phases[0].chooser.bound if len(self._phases) == 1 else None

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows`, and the number of earlier rows of that source: int64 [n] each.

        If `length` is not None, all `rows` are below it.
        """
        if len(self._phases) == 1:
            return self._phases[0].chooser.choose(rows)
        sources, before = np.empty((2, len(rows)), np.int64)
        for number, selected in groups(np.searchsorted(self._first_rows, rows, side="right") - 1):
            phase = self._phases[number]
            sources[selected], before_in_phase = phase.chooser.choose(rows[selected] - phase.row)
            before[selected] = before_in_phase + self._counts[number][sources[selected]]
        return sources, before

    def counts(self, row: int) -> list[int]:
        """Return the number of rows of each source before `row`, or before the mixture's end if that comes first."""
        if self._end is not None:
            row = min(row, self._end)
        phase = self._phases[bisect_right(self._first_rows, row) - 1]
        return list(map(sum, zip(phase.counts, phase.chooser.counts(row - phase.row), strict=True)))

    def find(self, source: int, numbers: Ints) -> Ints:
        """Return, for each i, the row of the mixture that is row `numbers[i]` of `source`, or -1 for none: int64 [n]."""
        rows = np.full(len(numbers), -1, np.int64)
        # If the source gave 3 rows before phase 1 and 8 rows before phase 2, phase 1 has its rows 3 to 7.
        phase_numbers = np.searchsorted(self._counts[:, source], numbers, side="right") - 1
        for phase_number, selected in groups(phase_numbers):
            phase = self._phases[phase_number]
            rows_of_phase = phase.chooser.find(source, numbers[selected] - phase.counts[source])
            rows[selected] = np.where(rows_of_phase >= 0, rows_of_phase + phase.row, -1)
        if self._end is not None:
            rows[rows >= self._end] = -1
        return rows


Path = tuple[tuple[Proportions, int], ...]
"""Path from the outermost mixture to a source. Each entry is (proportions of a mixture, index of the source in it that leads
on). ((outermost, 0), (inner, 2)) leads to source 2 of source 0."""


def count_drawn(path: Path, row: int) -> int:
    """Return the number of rows that the source at the end of a path has before `row` of the outermost mixture."""
    for proportions, source in path:
        row = proportions.counts(row)[source]
    return row


def find_drawn(path: Path, numbers: Ints) -> Ints:
    """Return, for each i, the row of the outermost mixture that is row `numbers[i]` of the source at the end of a path.

    The result is int64 [n], with -1 for a row that is never drawn.
    """
    for proportions, source in reversed(path):
        rows = np.full(len(numbers), -1, np.int64)
        is_drawn = numbers >= 0
        rows[is_drawn] = proportions.find(source, numbers[is_drawn])
        numbers = rows
    return numbers


def as_shares(weights: Sequence[tuple[str, object]]) -> Shares:
    """Return shares that sum to 1 from pairs (name, weight), or raise a `SamplerError`."""
    exact = [_as_weight(name, weight) for name, weight in weights]
    whole = sum(exact, Fraction(0))
    if not whole:
        raise SamplerError(f"weights {', '.join(name for name, _ in weights)}: all are 0; expected one above 0.")
    return tuple(weight / whole for weight in exact)


def _as_weight(name: str, weight: object) -> Fraction:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        if isinstance(weight, numbers.Real | str) and not isinstance(weight, bool) and Fraction(str(weight)) >= 0:
            return Fraction(str(weight))
    raise SamplerError(f"weight of {name!r}: {weight!r}; expected a number from 0 on, or text like '1/3'.")
