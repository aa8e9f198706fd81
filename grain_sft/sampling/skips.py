"""Skips: steps of a run whose batches no step of the trainer reads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream

if TYPE_CHECKING:
    from jaxtyping import Int64


class Skips:
    """Map between the steps of a trainer and the data steps of a sampler, of which some are skipped.

    Args:
      skips: Pairs (step, num_steps): from the trainer's step `step` on, `num_steps` data steps more are left out.

    Raises:
      SamplerError: A pair without a step from 0 on and a number of steps from 1 on.
    """

    def __init__(self, skips: Iterable[tuple[int, int]]) -> None:
        self._steps, self._skipped = [0], [0]  # trainer's steps at which more is skipped, and all that is skipped there
        for first, count in sorted(skips):
            step = as_integer("skip: from", first, 0, SamplerError)
            if step > self._steps[-1]:
                self._steps.append(step)
                self._skipped.append(self._skipped[-1])
            self._skipped[-1] += as_integer("skip: steps", count, 1, SamplerError)
        self._data = [step + skipped for step, skipped in zip(self._steps, self._skipped, strict=True)]
        self._columns = np.array([self._steps, self._skipped, self._data], np.int64)

    @property
    def steps(self) -> list[int]:
        """Steps of the trainer before which data steps are skipped, and step 0."""
        return self._steps

    def data_step(self, step: int) -> int:
        """Return the data step that the trainer's `step` reads."""
        return step + self._skipped[bisect_right(self._steps, step) - 1]

    def data_steps(self, steps: Ints) -> Ints:
        """Return the data step of each of the trainer's `steps`, int64 [n]."""
        found: Ints = steps + self._columns[1, np.searchsorted(self._columns[0], steps, side="right") - 1]
        return found

    def step_of(self, data_step: int) -> int:
        """Return the first step of the trainer that reads `data_step` or a later one."""
        entry = bisect_right(self._data, data_step) - 1
        step = data_step - self._skipped[entry] if entry >= 0 else 0
        return min(step, self._steps[entry + 1]) if entry + 1 < len(self._steps) else step

    def steps_of(self, data_steps: Ints) -> Ints:
        """Return the trainer's step that reads each of `data_steps`, int64 [n]; -1 for a step below 0 or that none reads."""
        entry = np.searchsorted(self._columns[2], data_steps, side="right") - 1
        steps = data_steps - self._columns[1, entry]
        ends = np.append(self._columns[0, 1:], sys.maxsize)
        return np.where((entry >= 0) & (data_steps >= 0) & (steps < ends[entry]), steps, -1)

    def skipped_between(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the first and the end of each range of skipped data steps within [first, end)."""
        before = 0
        for step, skipped in zip(self._steps, self._skipped, strict=True):
            begin, stop = max(first, step + before), min(end, step + skipped)
            if begin < stop:
                yield begin, stop
            before = skipped


class SkippingSampler(Sampler):
    """A sampler without some of its steps: step k is the step `skips.data_step(k)` of `sampler`.

    Batch sizes and the weights of a mixture are those of the data step, so that every step has the batch that it would have
    had later.

    Args:
      sampler: Sampler of all steps.
      skips: Pairs (step, num_steps), as in `Skips`.
      host: Host to read for; None for that of `sampler`.

    Raises:
      SamplerError: As `Skips`, or all steps are skipped.
    """

    def __init__(self, sampler: Sampler, skips: Iterable[tuple[int, int]], host: Host | None = None) -> None:
        self.sampler = sampler if host is None or host == sampler.host else sampler.with_host(host)
        self.skips = tuple(skips)
        self._map = Skips(self.skips)
        sizes = self.sampler.batch_sizes
        changes = {*self._map.steps, *(self._map.step_of(step) for step in sizes.steps)}
        found = {step: sizes.at(self._map.data_step(step)) for step in sorted(changes)}
        first, *schedule = found.items()
        super().__init__(first[1], schedule, self.sampler.host, host_blocks=self.sampler.host_blocks)
        for name in ("num_instances", "runs_on", "epochs"):
            setattr(self, name, getattr(self.sampler, name))
        if self.num_steps == 0:
            raise SamplerError(f"skip: all {self.sampler.num_steps} steps are skipped. Skip fewer.")
        self.streams = tuple(map(self._stream, self.sampler.streams))

    def _stream(self, stream: EpochStream) -> EpochStream:
        """Return a stream of `sampler`, in steps of the trainer."""

        def begin(step: int) -> tuple[int, int]:
            return stream.begin(self._map.data_step(step))

        def before(epoch: int, data_step: int, rows: int) -> int:
            """Return how many of an epoch's `rows` the data steps before `data_step` have."""
            at, into = stream.begin(data_step)
            return into if at == epoch else rows if at > epoch else 0

        def span(epoch: int) -> EpochSpan | None:
            found = stream.span(epoch)
            if found is None or found.last == sys.maxsize:
                return found and found._replace(first=self._map.step_of(found.first))
            steps = range(self._map.step_of(found.first), self._map.step_of(found.last + 1))
            ranges = list(self._map.skipped_between(found.first, found.last + 1))
            skipped = [before(epoch, end, found.rows) - before(epoch, begin, found.rows) for begin, end in ranges]

            def read(step: int) -> int:
                """Return the number of rows that the trainer has read after `step`."""
                data_step = self._map.data_step(step)
                left_out = sum(rows for (_, end), rows in zip(ranges, skipped, strict=True) if end <= data_step)
                return before(epoch, data_step + 1, found.rows) - left_out

            rows = read(steps[-1]) if steps else 0
            if not rows:
                return EpochSpan(steps.start, steps.start - 1, 0)
            first, last = (steps[bisect_left(steps, least, key=read)] for least in (1, rows))
            start = before(epoch, self._map.data_step(first), found.rows)
            return EpochSpan(first, last, rows, start // stream.num_blocks)

        return dataclasses.replace(stream, begin=begin, span=span)

    def with_host(self, host: Host) -> SkippingSampler:
        return SkippingSampler(self.sampler, self.skips, host)

    @functools.cached_property
    def num_steps(self) -> int | None:
        return None if self.sampler.num_steps is None else self._map.step_of(self.sampler.num_steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """None: epochs differ, as their steps are skipped or not."""
        return None

    def steps_of_epochs(self, epochs: int | None) -> int:
        return self._map.step_of(self.sampler.steps_of_epochs(epochs))

    def check_from(self, step: int) -> None:
        self.sampler.check_from(self._map.data_step(step))

    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        return self.sampler.rows(self._map.data_step(self._checked_step(step)))

    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return self.sampler.rows_at(self._map.data_step(self._checked_step(step)), places)

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        inner = [step for step in self._map.steps if steps.start < step < steps.stop]
        found = [np.zeros((7, 0), np.int64)]
        for first, end in itertools.pairwise([steps.start, *inner, steps.stop]):
            moved = self._map.data_step(first) - first
            slots = self.sampler.slots(range(first + moved, end + moved), hosts=hosts)
            found.append(np.array([slots.step - moved, *slots.columns()[1:]]))
        return BatchSlots(*np.concatenate(found, axis=1))

    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        slots = self.sampler.find_slots(rows, epochs=epochs, hosts=hosts)
        found = dataclasses.replace(slots, step=self._map.steps_of(slots.step))
        return found.select(np.flatnonzero(found.step >= 0))

    @property
    def data_key(self) -> str:
        return f"SkippingSampler({self.sampler.data_key}, skips={list(self.skips)})"
