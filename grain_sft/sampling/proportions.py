"""Proportions: the source of each row of a mixture, and the number of rows of that source before it."""

import contextlib
import math
import numbers
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.balanced_schedule import ScheduleTable
from grain_sft.sampling.halving import HalvingTree
from grain_sft.sampling.orders import Ints

Shares = tuple[Fraction, ...]
OnExhausted = Literal["repeat", "stop", "renormalize", "fail"]

TABLE_ROWS = 1 << 22
"""Longest period of weights that has a `ScheduleTable`; longer periods take a `HalvingTree`."""


class _Phase(NamedTuple):
    """Rows divided by constant weights, from `row` on; `counts` are the rows of each source before `row`."""

    row: int
    counts: tuple[int, ...]
    chooser: ScheduleTable | HalvingTree


class Proportions:
    """The source of each row of a mixture, in proportion to the shares: a pure function of the row, in constant time.

    With constant weights whose common denominator is at most `TABLE_ROWS` (4,194,304), each source is less than one row from
    its share after any number of rows (`ScheduleTable`). For other weights, such as 0.123456789, it is at most `bound` away: at
    most 1 row for up to 4 sources, 1.2 for up to 10, and less than 2 for any number (`HalvingTree`).

    Weights may change at some rows. Rows before a change do not depend on it. After it, each source keeps its deficit, which
    is its share so far minus its rows. So its rows follow its cumulative share: within one row, with up to three sources. With
    more, no rule can promise that without foreseeing the change: of 6 sources of equal weight, 3 have no row after row 3; if
    only these 3 have a weight from there on, one of them comes to 7/6 rows. A source whose weight becomes 0 keeps its deficit,
    and the others share the difference.

    Args:
      changes: Pairs of a row and the shares from it on, which sum to 1; the first is for row 0.
      limits: Number of rows of each source; None if it has no end. Read only with `on_exhausted`.
      on_exhausted: What happens when a source has no row left, for each source; empty if none ends. "stop": the rows end
        before the first row that it lacks. "fail": the same, and `failure` is set. "renormalize": after its last row the others
        divide its share.

    Attributes:
      length: Number of rows; None if they never end, or end in a failure.
      failure: First row that a source with "fail" lacks, and that source; None if no source fails.
    """

    def __init__(
        self,
        changes: Sequence[tuple[int, Shares]],
        limits: Sequence[int | None],
        on_exhausted: Sequence[OnExhausted] = (),
    ) -> None:
        self._changes, self._limits, self._on_exhausted = list(changes), list(limits), list(on_exhausted)
        self._phases: list[_Phase] = []
        self.length: int | None = None
        self.failure: tuple[int, int] | None = None
        row, counts, shares = 0, (0,) * len(limits), [Fraction(0)] * len(limits)
        while weights := self._weights(row, counts):
            end = next((at for at, _ in self._changes if at > row), None)
            deficit = tuple(share - count for share, count in zip(shares, counts, strict=True))
            num_rows = None if end is None else end - row
            table = sum(weights) <= TABLE_ROWS
            chooser = ScheduleTable(weights, deficit, num_rows) if table else HalvingTree(weights, deficit)
            self._phases.append(_Phase(row, counts, chooser))
            exhausted = self._first_exhausted(self._phases[-1])
            if exhausted is not None and (end is None or exhausted[0] < end):
                end, source = exhausted
                if self._on_exhausted[source] == "stop":
                    self.length = end
                    break
                if self._on_exhausted[source] == "fail":
                    self.failure = end, source
                    break
            if end is None:
                break
            for source, weight in enumerate(weights):
                shares[source] += Fraction(weight * (end - row), sum(weights))
            more = chooser.counts(end - row)
            row, counts = end, tuple(map(sum, zip(counts, more, strict=True)))
        else:
            self.length = row
            if not row:  # no source has a row
                self._phases.append(_Phase(0, counts, ScheduleTable((1,) * len(limits), (Fraction(0),) * len(limits))))
        self._end = self.length if self.failure is None else self.failure[0]
        self._rows = [phase.row for phase in self._phases]
        self._counts = np.array([phase.counts for phase in self._phases], np.int64)

    def _weights(self, row: int, counts: Sequence[int]) -> tuple[int, ...] | None:
        """Return the weights from `row` on, as integers; None if no source is left."""
        shares = [shares for at, shares in self._changes if at <= row][-1]
        if self._on_exhausted:
            columns = zip(shares, counts, self._limits, self._on_exhausted, strict=True)
            shares = tuple(
                Fraction(0) if how == "renormalize" and count == limit else share
                for share, count, limit, how in columns
            )
        common = math.lcm(*(share.denominator for share in shares))
        weights = [int(share * common) for share in shares]
        least = math.gcd(*weights)
        return tuple(weight // least for weight in weights) if least else None

    def _first_exhausted(self, phase: _Phase) -> tuple[int, int] | None:
        """Return the row at which a source is exhausted first, and that source; None if none is.

        It is the first row that the source lacks or, with "renormalize", the row after its last. If two sources are exhausted
        at one row, the one with "renormalize" goes first, because the rows go on after it."""
        ends = []
        for source, how in enumerate(self._on_exhausted):
            limit, count, last = self._limits[source], phase.counts[source], how == "renormalize"
            if limit is not None and (asked := limit - count - last) >= 0:
                found = int(phase.chooser.find(source, np.array([asked]))[0])
                if found >= 0:
                    ends.append((phase.row + found + last, not last, source))
        return min(((row, source) for row, _, source in sorted(ends)[:1]), default=None)

    @property
    def bound(self) -> float | None:
        """Rows that a source may be away from its share after any number of rows; None where weights change."""
        return self._phases[0].chooser.bound if len(self._phases) == 1 else None

    def choose(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the source of each of `rows` (int64 [n], below `length`), and the number of its rows before."""
        if len(self._phases) == 1:
            return self._phases[0].chooser.choose(rows)
        sources, before = np.empty((2, len(rows)), np.int64)
        which = np.searchsorted(self._rows, rows, side="right") - 1
        for number in np.unique(which).tolist():
            here = which == number
            sources[here], local = self._phases[number].chooser.choose(rows[here] - self._rows[number])
            before[here] = local + self._counts[number][sources[here]]
        return sources, before

    def counts(self, row: int) -> list[int]:
        """Return the rows of each source before `row`, or before the end."""
        if self._end is not None:
            row = min(row, self._end)
        phase = self._phases[bisect_right(self._rows, row) - 1]
        local = phase.chooser.counts(row - phase.row)
        return [before + more for before, more in zip(phase.counts, local, strict=True)]

    def find(self, source: int, rows: Ints) -> Ints:
        """Return the row of the mixture that is each of the `rows` of `source` (int64 [n], from 0); -1 where none is."""
        found = np.full(len(rows), -1, np.int64)
        which = np.searchsorted(self._counts[:, source], rows, side="right") - 1
        for number in np.unique(which).tolist():
            phase, here = self._phases[number], which == number
            at = phase.chooser.find(source, rows[here] - phase.counts[source])
            found[here] = np.where(at >= 0, at + phase.row, -1)
        if self._end is not None:
            found[found >= self._end] = -1
        return found


Path = tuple[tuple[Proportions, int], ...]
"""Proportions of each mixture that contains a source, outermost first, and its index among their sources."""


def count_drawn(path: Path, row: int) -> int:
    """Return the number of rows of the source at the end of a path before `row` of the outermost mixture."""
    for proportions, source in path:
        row = proportions.counts(row)[source]
    return row


def find_drawn(path: Path, numbers: Ints) -> Ints:
    """Return the row of the outermost mixture that is each of the rows `numbers` of the source at the end of a path, or -1."""
    for proportions, source in reversed(path):
        found = np.full(len(numbers), -1, np.int64)
        found[numbers >= 0] = proportions.find(source, numbers[numbers >= 0])
        numbers = found
    return numbers


def as_shares(weights: Sequence[tuple[str, object]]) -> Shares:
    """Return weights by name as exact shares of one (0.7 is 7/10, as written), or raise a `SamplerError`."""
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
