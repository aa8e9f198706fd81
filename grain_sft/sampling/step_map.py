"""StepMap and MappedSampler: which step of the sampler each step of the trainer reads, in runs that skip steps or have stages.

A data step is a step of the sampler. With 3 steps skipped at step 10, the trainer's step 10 reads data step 13.
"""

import dataclasses
import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import MOST_ROWS, JoinedSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture_sampler import NoRowLeftError
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream
from grain_sft.types import Ints

T = TypeVar("T")


class StepMap:
    """Map between the steps of a trainer and the data steps of a sampler.

    Args:
      skips: Pairs (step, num_steps). Each skips `num_steps` data steps before the trainer's step `step`.
      origin: Step of the trainer that reads data step 0, if no steps are skipped at or before it.

    Attributes:
      steps: `origin`, then the later values of `step` in `skips`, ascending.

    Raises:
      SamplerError: A `step` below 0, a `num_steps` below 1, or steps beyond int64.
    """

    def __init__(self, skips: Iterable[tuple[int, int]], origin: int = 0) -> None:
        self.steps = [origin]
        self._shifts = [-origin]  # data step minus trainer's step, from each of `steps` on
        for first, count in sorted(skips):
            step = as_integer("skip: from", first, 0, SamplerError)
            if step > self.steps[-1]:
                self.steps.append(step)
                self._shifts.append(self._shifts[-1])
            self._shifts[-1] += as_integer("skip: steps", count, 1, SamplerError)
        self._ends = [*self.steps[1:], sys.maxsize]  # first step of the trainer to which each shift no longer applies
        self._data_steps = [step + shift for step, shift in zip(self.steps, self._shifts, strict=True)]
        if (most := max(self.steps[-1], self._data_steps[-1])) > sys.maxsize:
            raise SamplerError(f"step {most}: expected a number below 2^63. Skip fewer steps, or shorten a stage.")

    def data_step(self, step: int) -> int:
        """Return the data step that the trainer's `step` reads. A step before `origin` has the same shift as `origin`."""
        return step + self._shifts[max(0, bisect_right(self.steps, step) - 1)]

    def step_of(self, data_step: int) -> int:
        """Return the first step of the trainer that reads `data_step` or a later data step."""
        entry = bisect_right(self._data_steps, data_step) - 1
        return self.steps[0] if entry < 0 else min(data_step - self._shifts[entry], self._ends[entry])

    def steps_of(self, data_steps: Ints) -> Ints:
        """Return the trainer's step that reads each of `data_steps`, or -1 for a data step that is not read: int64 [n]."""
        entry = np.searchsorted(self._data_steps, data_steps, side="right") - 1
        steps = data_steps - np.array(self._shifts)[entry]
        is_read = (entry >= 0) & (data_steps >= 0) & (steps < np.array(self._ends)[entry])
        return np.where(is_read, steps, -1)

    def read_between(self, first: int, end: int) -> Iterator[range]:
        """Yield the ranges of data steps within [first, end) that are not skipped."""
        for data_step, shift, step_end in zip(self._data_steps, self._shifts, self._ends, strict=True):
            data_steps = range(max(first, data_step), min(end, step_end + shift))
            if data_steps:
                yield data_steps


class MappedSampler(Sampler):
    """Sampler that reads some steps of another sampler: those that are not skipped, or those of one stage of a run.

    A skip moves later batches to earlier steps, unchanged in size and mixture weights.

    Args:
      sampler: Sampler of the data steps.
      skips: Pairs (step, num_steps), as in `StepMap`.
      origin: Step of the trainer that reads step 0 of `sampler`, as in `StepMap`.
      end: Step of the trainer after the last step of this sampler. None means that the sampler ends where `sampler` ends.

    Raises:
      SamplerError: As in `StepMap`.
    """

    def __init__(
        self, sampler: Sampler, skips: Iterable[tuple[int, int]] = (), *, origin: int = 0, end: int | None = None
    ) -> None:
        self.sampler, self.skips, self.origin, self.end = sampler, tuple(skips), origin, end
        self._map = StepMap(self.skips, origin)
        self.first_step = self._map.step_of(sampler.first_step)
        sizes = JoinedSizes((step, sampler.batch_sizes, self._map.data_step(step) - step) for step in self._map.steps)
        super().__init__(sizes, sampler.host)
        self.num_instances, self.epochs, self.runs_on = sampler.num_instances, sampler.epochs, sampler.runs_on
        self.host_blocks, self.consecutive_slots = sampler.host_blocks, sampler.consecutive_slots
        self.streams = tuple(map(self._stream, sampler.streams))
        if sampler.failing_step < sys.maxsize and (step := self._map.step_of(sampler.failing_step)) < self.end_step:
            self.failing_step = step

    def _stream(self, stream: EpochStream) -> EpochStream:
        """Return `stream` with `begin` and `span` in steps of the trainer."""
        span = functools.partial(self._span, stream)
        return dataclasses.replace(stream, begin=lambda step: stream.begin(self._map.data_step(step)), span=span)

    def _span(self, stream: EpochStream, epoch: int) -> EpochSpan | None:
        """Return the part of an epoch that the trainer reads, in steps of the trainer. The steps of `stream` are data steps.

        Example: data steps 0, 1 and 2 read an epoch of 12 rows, 4 rows each, and data step 0 is skipped. The trainer's steps 0
        and 1 read data steps 1 and 2. So the result is `EpochSpan(first=0, last=1, rows=8, start=4)`.
        """
        span = stream.span(epoch)
        if span is None:
            return None
        first_step = self._map.step_of(span.first)
        if first_step >= self.end_step:
            return None
        never_ends = span.last == sys.maxsize and self.num_steps is None  # see EpochSpan

        def rows_before(data_step: int) -> int:
            """Return the number of rows of `span` that data steps before `data_step` read."""
            epoch_at_step, rows = stream.begin(data_step)
            if epoch_at_step == epoch:
                return rows - span.start * stream.num_blocks  # `span.start` counts rows of one host's block
            return span.rows if epoch_at_step > epoch else 0

        def step_that_reads(row: int, data_steps: range) -> int:
            """Return the trainer's step that reads row `row` of `span`, counted from 0. One of `data_steps` reads the row."""
            # a bisection, because the data steps of a mixture have different numbers of rows of this source, or none
            number = bisect_right(data_steps, row, key=lambda data_step: rows_before(data_step + 1))
            return self._map.step_of(data_steps[number])

        # last data step that the trainer may read; without an end, the last step that the sampler can count
        last = self.sampler.batch_sizes.step_of(MOST_ROWS) if never_ends else self._map.data_step(self.end_step - 1)
        ranges = self._map.read_between(span.first, min(span.last, last) + 1)
        # each range of data steps, with the first row of `span` that these steps read, and the row after the last one
        read = [(data_steps, rows_before(data_steps.start), rows_before(data_steps.stop)) for data_steps in ranges]
        read = [(data_steps, row, end_row) for data_steps, row, end_row in read if row < end_row]
        if not read:  # all steps that read the epoch are skipped
            return EpochSpan(first_step, first_step - 1, 0)
        (first_range, first_row, _), (last_range, _, end_row) = read[0], read[-1]
        first_step, last_step = step_that_reads(first_row, first_range), step_that_reads(end_row - 1, last_range)
        num_rows = sum(end_row - row for _, row, end_row in read)
        start = span.start + first_row // stream.num_blocks
        return EpochSpan(first_step, span.last if never_ends else last_step, num_rows, start)

    def with_host(self, host: Host) -> Self:
        return self._with(sampler=self.sampler.with_host(host))

    def reweighted(self, changes: Sequence[tuple[int, Mapping[str, Any]]]) -> Self:
        # a step before `origin` belongs to an earlier stage, so its weights hold from data step 0 on
        in_data_steps = [(max(0, self._map.data_step(step)), weights) for step, weights in changes]
        return self._with(sampler=self.sampler.reweighted(in_data_steps))

    @functools.cached_property
    def num_steps(self) -> int | None:
        if self.sampler.num_steps is None:
            return self.end
        end_of_data = self._map.step_of(self.sampler.num_steps)
        return end_of_data if self.end is None else min(self.end, end_of_data)

    def steps_of_epochs(self, epochs: int | None) -> int:
        return min(self.end_step, self._map.step_of(self.sampler.steps_of_epochs(epochs)))

    @property
    def changes(self) -> list[int]:
        changes = {*self._map.steps, *map(self._map.step_of, self.sampler.changes)}
        return sorted(step for step in changes if self.first_step < step < self.end_step)

    def row_length(self, step: int) -> int | None:
        return self.sampler.row_length(self._map.data_step(self._checked_step(step)))

    def rows(self, step: int) -> Ints:
        return self._read(self.sampler.rows, self._map.data_step(self._checked_step(step)))

    def rows_at(self, step: int, places: Ints) -> Ints:
        return self._read(self.sampler.rows_at, self._map.data_step(self._checked_step(step)), places)

    def _read(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a `method` of `sampler`. A `NoRowLeftError` names the trainer's step instead of the data step."""
        try:
            return method(*arguments, **options)
        except NoRowLeftError as error:
            data_step, text = error.args
            raise NoRowLeftError(self._map.step_of(data_step), text) from None

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        self._check_steps(steps)
        first, last = self._map.data_step(steps.start), self._map.data_step(steps.stop - 1)
        ranges = self._map.read_between(first, last + 1)
        slots = BatchSlots.joined(self._read(self.sampler.slots, data_steps, hosts=hosts) for data_steps in ranges)
        return dataclasses.replace(slots, step=self._map.steps_of(slots.step))

    def find_slots(self, rows: Ints, *, epochs: int | None = None, hosts: Sequence[int] | None = None) -> BatchSlots:
        if epochs is None and self.end is not None:  # search only the epochs that the stage reads
            last = self._map.data_step(self.end - 1)
            num_epochs = 1 + max(stream.begin(last + 1)[0] for stream in self.sampler.streams)
            epochs = num_epochs if self.epochs is None else min(num_epochs, self.epochs)
        slots = self.sampler.find_slots(rows, epochs=epochs, hosts=hosts)
        slots = dataclasses.replace(slots, step=self._map.steps_of(slots.step))
        return slots.select(np.flatnonzero((slots.step >= 0) & (slots.step < self.end_step)))

    @property
    def data_key(self) -> str:
        return self._key(self.sampler.data_key)

    @property
    def receipt(self) -> str:
        return self._key(self.sampler.receipt)

    def _key(self, sampler: str) -> str:
        steps = f", origin={self.origin}, end_step={self.end}" if self.origin or self.end is not None else ""
        return f"MappedSampler({sampler}, skips={list(self.skips)}{steps})"
