"""BatchSizes: the number of rows in the global batch of each step, and in all steps before that step."""

import sys
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import SamplerError
from grain_sft.layout import groups
from grain_sft.types import Ints

MOST_ROWS = 1 << 62  # maximum number of rows of a schedule or a mixture, so that row numbers fit int64


class StepRows(NamedTuple):
    """Number of rows before each of several steps, and in each of these steps."""

    before: Ints  # int64 [n], number of rows of the run before each step
    size: Ints  # int64 [n], number of rows in each step


class BatchSizes:
    """Schedule of the global batch size: the number of rows in each step's batch.

    Args:
      first: Size from step 0 on.
      schedule: Pairs (step, size), with ascending steps. The size holds from the step on.

    Attributes:
      steps: Step 0, and each step at which the size may change.
      sizes: Size from each of `steps` on. In the subclass `ComputedSizes`, all sizes that a step may have.
      schedule: Changes of the size after step 0, as pairs (step, size).

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
        if (rows := self._before[-1] + self.sizes[-1]) > MOST_ROWS:
            problem = f"global_batch_size: {rows} rows up to step {self.steps[-1]}; expected at most 2^62"
            raise SamplerError(f"{problem}. Take smaller sizes.")
        self._columns = np.array([self.steps, self.sizes, self._before], np.int64)  # one column for each of `steps`
        self.schedule = tuple(zip(self.steps[1:], self.sizes[1:], strict=True))

    def at(self, step: int) -> int:
        """Return the number of rows in the global batch of `step`."""
        return self.sizes[bisect_right(self.steps, step) - 1]

    def steps_of_one_size(self, step: int) -> int:
        """Return the number of steps from `step` to the next of `steps`; `sys.maxsize` if none follows."""
        return next((change - step for change in self.steps if change > step), sys.maxsize)

    def before(self, step: int) -> int:
        """Return the number of rows in all steps before `step`."""
        entry = bisect_right(self.steps, step) - 1
        return self._before[entry] + (step - self.steps[entry]) * self.sizes[entry]

    def step_of(self, row: int) -> int:
        """Return the step that reads row number `row` of the run: with batches of 4, step 2 reads row 9."""
        entry = bisect_right(self._before, row) - 1
        return self.steps[entry] + (row - self._before[entry]) // self.sizes[entry]

    def of_steps(self, steps: Ints) -> StepRows:
        """Return the number of rows before each of `steps` and the number in it, int64 [n] each."""
        first, sizes, before = self._columns[:, np.searchsorted(self.steps, steps, side="right") - 1]
        return StepRows(before + (steps - first) * sizes, sizes)

    def steps_of(self, rows: Ints) -> Ints:
        """Return the step that reads each of `rows`: int64 [n], row numbers of the run, from 0."""
        first, sizes, before = self._columns[:, np.searchsorted(self._before, rows, side="right") - 1]
        steps: Ints = first + (rows - before) // sizes
        return steps

    def check_from(self, step: int, hosts: int, end: int = sys.maxsize) -> None:
        """Raise a `SamplerError` if the size of a step from `step` to `end - 1` is not a multiple of `hosts`."""
        for first in (step, *(change for change in self.steps if step < change < end)):
            check_divided(self.at(first), hosts, first if len(self.sizes) > 1 else None)


class ComputedSizes(BatchSizes):
    """Base of batch sizes that are not a table of `steps` and `sizes`.

    A subclass sets the attributes, and defines `at`, `of_steps` (rows of steps) and `steps_of` (steps of rows).
    """

    def before(self, step: int) -> int:
        return int(self.of_steps(np.array([step])).before[0])

    def step_of(self, row: int) -> int:
        return int(self.steps_of(np.array([row]))[0])


class _Part(NamedTuple):
    """Consecutive steps of a run that take their sizes from one `BatchSizes`."""

    first_step: int
    first_row: int  # number of rows of the run before `first_step`
    sizes: BatchSizes
    step_shift: int  # step k of the run is step k + step_shift of `sizes`
    row_shift: int  # row r of the run is row r + row_shift of `sizes`

    def before(self, step: int) -> int:
        return self.sizes.before(step + self.step_shift) - self.row_shift


class JoinedSizes(ComputedSizes):
    """Batch sizes of consecutive parts of a run, such as its stages.

    Args:
      parts: Triples (first step, sizes, shift). From the first step on, step k has the size of step k + shift of `sizes`.
        For a step before the first part, `before` returns 0, and `at` returns the size of the first part's first step.
    """

    def __init__(self, parts: Iterable[tuple[int, BatchSizes, int]]) -> None:
        self._parts: list[_Part] = []
        for first_step, sizes, shift in parts:
            first_row = self._parts[-1].before(first_step) if self._parts else 0
            row_shift = sizes.before(first_step + shift) - first_row
            self._parts.append(_Part(first_step, first_row, sizes, shift, row_shift))
        self._first_steps = [part.first_step for part in self._parts]
        self._first_rows = [part.first_row for part in self._parts]
        changes: dict[int, int] = {}  # size by step: at the first step of each part, and where the part's size changes
        for part, end in zip(self._parts, [*self._first_steps[1:], sys.maxsize], strict=True):
            changes[part.first_step] = part.sizes.at(part.first_step + part.step_shift)
            for own_step, size in part.sizes.schedule:
                step = own_step - part.step_shift
                if part.first_step < step < end:
                    changes[step] = size
        self.schedule = tuple(changes.items())[1:]
        self.steps = [0, *(step for step, _ in self.schedule)]
        own_sizes = [size for part in self._parts for size in part.sizes.sizes]
        self.sizes = list(dict.fromkeys([*changes.values(), *own_sizes]))

    def at(self, step: int) -> int:
        part = self._parts[max(0, bisect_right(self._first_steps, step) - 1)]
        return part.sizes.at(max(step, part.first_step) + part.step_shift)

    def of_steps(self, steps: Ints) -> StepRows:
        """See `BatchSizes.of_steps`. A step before the first part counts as that part's first step."""
        rows = StepRows(np.zeros_like(steps), np.zeros_like(steps))
        numbers = np.maximum(np.searchsorted(self._first_steps, steps, side="right") - 1, 0)
        for number, selected in groups(numbers):
            part = self._parts[number]
            own = part.sizes.of_steps(np.maximum(steps[selected], part.first_step) + part.step_shift)
            rows.before[selected] = own.before - part.row_shift
            rows.size[selected] = own.size
        return rows

    def steps_of(self, rows: Ints) -> Ints:
        steps = np.zeros_like(rows)
        for number, selected in groups(np.searchsorted(self._first_rows, rows, side="right") - 1):
            part = self._parts[number]
            steps[selected] = part.sizes.steps_of(rows[selected] + part.row_shift) - part.step_shift
        return steps


def check_divided(size: int, hosts: int, step: int | None = None) -> None:
    """Raise a `SamplerError` if the batch size `size` is not a multiple of `hosts`. The message names `step`, if given."""
    if size % hosts:
        at = "" if step is None else f", from step {step} on,"
        problem = f"global_batch_size={size}{at} can't be divided by {hosts} hosts"
        raise SamplerError(f"{problem}: {size % hosts} of its rows would be left over. Take a multiple of {hosts}.")


def checked_entries(schedule: Iterable[tuple[int, object]], form: str) -> list[tuple[int, object]]:
    """Return the pairs (step, value) of a schedule. Raise an error unless the steps are 1 or more, and ascend.

    `form` is the form of a pair for messages, such as "(step, global_batch_size)".
    """
    check_type("schedule", schedule, Iterable, f"a list of pairs {form}")
    entries: list[tuple[int, object]] = []
    for entry in schedule:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise SamplerError(f"schedule: {entry!r}; expected {form}.")
        step = as_integer("schedule: step", entry[0], 1, SamplerError)
        if entries and step <= entries[-1][0]:
            raise SamplerError(f"schedule: step {step} follows step {entries[-1][0]}; expected steps that ascend.")
        entries.append((step, entry[1]))
    return entries
