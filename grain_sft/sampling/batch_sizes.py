"""BatchSizes: the number of rows in each step's global batch, and in all batches before it."""

import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any, get_args

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.orders import Ints

_MOST_ROWS = 1 << 62  # before a change of size, and in a step: they are int64


class BatchSizes:
    """Schedule of the global batch size: the number of rows in each step's batch.

    Args:
      first: Size from step 0 on.
      schedule: Pairs (step, size) with ascending steps: the size from that step on.

    Attributes:
      steps, sizes: First step of each size, and the sizes.
      schedule: Changes of the size: pairs (step, size).

    Raises:
      SamplerError: Sizes or steps that are not positive integers, steps that don't ascend, or more than 2^62 rows.
    """

    def __init__(self, first: int, schedule: Iterable[tuple[int, int]] = ()) -> None:
        self.steps, self.sizes = [0], [as_integer("global_batch_size", first, 1, SamplerError)]
        self._before = [0]  # rows before each of `steps`
        for step, size in checked_entries(schedule, "(step, global_batch_size)"):
            self._before.append(self._before[-1] + (step - self.steps[-1]) * self.sizes[-1])
            self.steps.append(step)
            self.sizes.append(as_integer(f"schedule: global_batch_size at step {step}", size, 1, SamplerError))
        if (rows := max(self._before[-1] + self.sizes[-1], *self.sizes)) > _MOST_ROWS:
            raise SamplerError(
                f"global_batch_size: {rows} rows up to step {self.steps[-1]}; expected at most 2^62. Take smaller sizes."
            )
        self._columns = np.array([self.steps, self.sizes, self._before], np.int64)
        self.schedule = tuple(zip(self.steps[1:], self.sizes[1:], strict=True))

    def at(self, step: int) -> int:
        """Return the number of rows in the global batch of `step`."""
        return self.sizes[bisect_right(self.steps, step) - 1]

    def steps_of_one_size(self, step: int) -> int:
        """Return the number of steps from `step` to the next change of size; `sys.maxsize` if none follows."""
        return next((change - step for change in self.steps if change > step), sys.maxsize)

    def before(self, step: int) -> int:
        """Return the number of rows in all steps before `step`."""
        entry = bisect_right(self.steps, step) - 1
        return self._before[entry] + (step - self.steps[entry]) * self.sizes[entry]

    def step_of(self, row: int) -> int:
        """Return the step that reads row `row` (from 0) of the run, which is also the number of whole steps in `row` rows."""
        entry = bisect_right(self._before, row) - 1
        return self.steps[entry] + (row - self._before[entry]) // self.sizes[entry]

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        """Return the number of rows before each of `steps`, int64 [n], and the number of rows in each."""
        first, sizes, before = self._columns[:, np.searchsorted(self.steps, steps, side="right") - 1]
        return before + (steps - first) * sizes, sizes

    def steps_of(self, rows: Ints) -> Ints:
        """Return the step that reads each of `rows`, int64 [n], row numbers in the run."""
        first, sizes, before = self._columns[:, np.searchsorted(self._before, rows, side="right") - 1]
        steps: Ints = first + (rows - before) // sizes
        return steps

    def check_from(self, step: int, hosts: int, end: int = sys.maxsize) -> None:
        """Raise a `SamplerError` if the size at `step`, or after a change before `end`, is not a multiple of `hosts`."""
        for first in (step, *(change for change in self.steps if step < change < end)):
            check_divided(self.at(first), hosts, first if len(self.sizes) > 1 else None)


class ComputedSizes(BatchSizes):
    """Base of batch sizes that compute `begins` and `steps_of` in their own way."""

    def before(self, step: int) -> int:
        return int(self.begins(np.array([step]))[0][0])

    def step_of(self, row: int) -> int:
        return int(self.steps_of(np.array([row]))[0])


class JoinedSizes(ComputedSizes):
    """Batch sizes of consecutive ranges of steps, such as the stages of a run.

    Args:
      ranges: Triples (first step, sizes, shift): from that step on, step k has the size of step k + shift of `sizes`. Steps
        before the first range have no rows.
    """

    def __init__(self, ranges: Iterable[tuple[int, BatchSizes, int]]) -> None:
        self._ranges = list(ranges)
        self._firsts = [first for first, _, _ in self._ranges]
        changes: dict[int, int] = {}
        before = 0
        self._rows_before: list[int] = []  # before each range
        for (first, sizes, shift), end in zip(self._ranges, [*self._firsts[1:], sys.maxsize], strict=True):
            self._rows_before.append(before)
            changes[first] = sizes.at(first + shift)
            changes |= {step - shift: size for step, size in sizes.schedule if first < step - shift < end}
            if end < sys.maxsize:
                before += sizes.before(end + shift) - sizes.before(first + shift)
        self.steps = [0, *list(changes)[1:]]
        self.schedule = tuple(changes.items())[1:]
        of_ranges = (size for _, each, _ in self._ranges for size in each.sizes)
        self.sizes = list(dict.fromkeys([*changes.values(), *of_ranges]))

    def at(self, step: int) -> int:
        first, sizes, shift = self._ranges[max(0, bisect_right(self._firsts, step) - 1)]
        return sizes.at(max(step, first) + shift)

    def begins(self, steps: Ints) -> tuple[Ints, Ints]:
        before, found = np.zeros_like(steps), np.zeros_like(steps)
        ranges = np.maximum(np.searchsorted(self._firsts, steps, side="right") - 1, 0)
        for at in np.unique(ranges).tolist():
            here, (first, sizes, shift) = np.flatnonzero(ranges == at), self._ranges[at]
            rows, found[here] = sizes.begins(np.maximum(steps[here], first) + shift)
            before[here] = self._rows_before[at] + rows - sizes.before(first + shift)
        return before, found

    def steps_of(self, rows: Ints) -> Ints:
        steps, ranges = np.zeros_like(rows), np.searchsorted(self._rows_before, rows, side="right") - 1
        for at in np.unique(ranges).tolist():
            here, (first, sizes, shift) = np.flatnonzero(ranges == at), self._ranges[at]
            steps[here] = sizes.steps_of(rows[here] - self._rows_before[at] + sizes.before(first + shift)) - shift
        return steps


def check_divided(size: int, hosts: int, step: int | None = None) -> None:
    """Raise a `SamplerError`, which names `step`, if `size` is not a multiple of `hosts`."""
    if size % hosts:
        at = "" if step is None else f", from step {step} on,"
        raise SamplerError(
            f"global_batch_size={size}{at} can't be divided by {hosts} hosts: {size % hosts} rows are left over. Take a "
            f"multiple of {hosts}."
        )


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raise a `SamplerError` unless `value`, of the argument `name`, is one of `choices`, a `Literal`."""
    if value not in get_args(choices):
        raise SamplerError(f"{name}={value!r}: expected one of {', '.join(get_args(choices))}.")


def checked_entries(schedule: Iterable[tuple[int, object]], form: str) -> list[tuple[int, object]]:
    """Return the entries of a schedule; raise a `SamplerError` unless they are pairs with ascending steps from 1 on."""
    entries: list[tuple[int, object]] = []
    for entry in schedule:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise SamplerError(f"schedule: {entry!r}; expected {form}.")
        step = as_integer("schedule: step", entry[0], 1, SamplerError)
        if entries and step <= entries[-1][0]:
            raise SamplerError(f"schedule: step {step} follows step {entries[-1][0]}; expected steps that ascend.")
        entries.append((step, entry[1]))
    return entries
