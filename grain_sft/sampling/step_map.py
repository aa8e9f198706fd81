"""StepMap and MappedSampler: which data step each step of the trainer reads, where a run skips some or has stages."""

from __future__ import annotations

import dataclasses
import functools
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.batch_sizes import JoinedSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture_sampler import NoRowLeftError
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream

if TYPE_CHECKING:
    from jaxtyping import Int64

T = TypeVar("T")


class StepMap:
    """Map between the steps of a trainer and the data steps of a sampler. Some data steps are skipped.

    Args:
      skips: Pairs (step, num_steps). Each skips `num_steps` data steps before the trainer's step `step`.
      origin: Step of the trainer that reads data step 0, if none is skipped before it.

    Attributes:
      steps: `origin` and the later steps of the trainer before which data steps are skipped, ascending.

    Raises:
      SamplerError: A `step` below 0, a `num_steps` below 1, or steps beyond int64.
    """

    def __init__(self, skips: Iterable[tuple[int, int]], origin: int = 0) -> None:
        self.steps, self._skipped = [origin], [-origin]  # from each step on: data step minus trainer's step
        for first, count in sorted(skips):
            step = as_integer("skip: from", first, 0, SamplerError)
            if step > self.steps[-1]:
                self.steps.append(step)
                self._skipped.append(self._skipped[-1])
            self._skipped[-1] += as_integer("skip: steps", count, 1, SamplerError)
        self._data = [step + skipped for step, skipped in zip(self.steps, self._skipped, strict=True)]
        if max(self.steps[-1], self._data[-1]) > sys.maxsize:
            raise SamplerError(f"skip: step {self.steps[-1]} would read data step {self._data[-1]}. Skip fewer steps.")

    def data_step(self, step: int) -> int:
        """Return the data step that the trainer's `step` reads; a step before `origin` counts back from that of `origin`."""
        return step + self._skipped[max(0, bisect_right(self.steps, step) - 1)]

    def step_of(self, data_step: int) -> int:
        """Return the first step of the trainer that reads `data_step` or a later one."""
        entry = bisect_right(self._data, data_step) - 1
        step = data_step - self._skipped[entry] if entry >= 0 else self.steps[0]
        return min(step, self.steps[entry + 1]) if entry + 1 < len(self.steps) else step

    def steps_of(self, data_steps: Ints) -> Ints:
        """Return int64 [n], the trainer's step that reads each of `data_steps`, int64 [n]; -1 for a skipped data step."""
        entry = np.searchsorted(self._data, data_steps, side="right") - 1
        steps = data_steps - np.array(self._skipped)[entry]
        ends = np.array([*self.steps[1:], sys.maxsize])
        return np.where((entry >= 0) & (data_steps >= 0) & (steps < ends[entry]), steps, -1)

    def read_between(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each range of data steps within [first, end) that are not skipped."""
        for data, skipped, last in zip(self._data, self._skipped, [*self.steps[1:], sys.maxsize], strict=True):
            begin, stop = max(first, data), min(end, last + skipped)
            if begin < stop:
                yield begin, stop


class MappedSampler(Sampler):
    """A sampler of a selection of the steps of another: all but skipped ones, or those of a stage of a run.

    Batch sizes and mixture weights are those of the data step. A skip thus delivers later batches earlier, but unchanged.

    Args:
      sampler: Sampler of the data steps.
      skips: Pairs (step, num_steps), as in `StepMap`.
      origin: Step that reads step 0 of `sampler`, if none is skipped before it.
      end: Step after the last; None for the end of `sampler`.

    Raises:
      SamplerError: As in `StepMap`.
    """

    steps_per_epoch = None  # an epoch with skipped steps has fewer steps than others

    def __init__(
        self, sampler: Sampler, skips: Iterable[tuple[int, int]] = (), *, origin: int = 0, end: int | None = None
    ) -> None:
        self.sampler, self.skips, self.origin, self.end = sampler, tuple(skips), origin, end
        self._map = StepMap(self.skips, origin)
        self.first_step = self._map.step_of(sampler.first_step)
        sizes = self.sampler.batch_sizes
        joined = JoinedSizes((step, sizes, self._map.data_step(step) - step) for step in self._map.steps)
        super().__init__(joined, self.sampler.host, host_blocks=self.sampler.host_blocks)
        for name in ("num_instances", "runs_on", "epochs", "consecutive_slots"):
            setattr(self, name, getattr(self.sampler, name))
        self.streams = tuple(map(self._stream, self.sampler.streams))

    def _stream(self, stream: EpochStream) -> EpochStream:
        """Return a stream of `sampler`, in steps of the trainer."""

        def begin(step: int) -> tuple[int, int]:
            return stream.begin(self._map.data_step(step))

        def span(epoch: int) -> EpochSpan | None:
            found = stream.span(epoch)
            if found is None:
                return None
            first = self._map.step_of(found.first)
            if first >= self.end_step:
                return None
            if found.last == sys.maxsize and self.num_steps is None:
                return found._replace(first=first)

            def rows_before(data_step: int) -> int:
                """Return the number of rows of `found` that data steps before `data_step` read."""
                epoch_at, rows = stream.begin(data_step)
                if epoch_at == epoch:
                    return rows - found.start * stream.num_blocks
                return found.rows if epoch_at > epoch else 0

            def step_that_reads(row: int, data_steps: range) -> int:
                """Return the trainer's step that reads row number `row` of `found`."""
                at = bisect_right(data_steps, row, key=lambda step: rows_before(step + 1))
                return self._map.step_of(data_steps[at])

            end = min(found.last, self._map.data_step(self.end_step - 1)) + 1
            parts = [range(*each) for each in self._map.read_between(found.first, end)]
            counts = [rows_before(each.stop) - rows_before(each.start) for each in parts]
            parts = [each for each, count in zip(parts, counts, strict=True) if count]
            if not parts:
                return EpochSpan(first, first - 1, 0)
            start, stop = rows_before(parts[0].start), rows_before(parts[-1].stop)
            first, last = step_that_reads(start, parts[0]), step_that_reads(stop - 1, parts[-1])
            return EpochSpan(first, last, sum(counts), found.start + start // stream.num_blocks)

        return dataclasses.replace(stream, begin=begin, span=span)

    def _mapped(self, sampler: Sampler) -> MappedSampler:
        return MappedSampler(sampler, self.skips, origin=self.origin, end=self.end)

    def with_host(self, host: Host) -> MappedSampler:
        return self._mapped(self.sampler.with_host(host))

    def reweighted(self, step: int, weights: Mapping[str, Any]) -> MappedSampler:
        return self._mapped(self.sampler.reweighted(max(0, self._map.data_step(step)), weights))

    @functools.cached_property
    def num_steps(self) -> int | None:
        ends = [self.end, None if self.sampler.num_steps is None else self._map.step_of(self.sampler.num_steps)]
        return min((end for end in ends if end is not None), default=None)

    def steps_of_epochs(self, epochs: int | None) -> int:
        return min(self.end_step, self._map.step_of(self.sampler.steps_of_epochs(epochs)))

    @property
    def changes(self) -> list[int]:
        found = {*self._map.steps, *map(self._map.step_of, self.sampler.changes)}
        return sorted(step for step in found if self.first_step < step < self.end_step)

    def row_length(self, step: int) -> int | None:
        return self.sampler.row_length(self._map.data_step(self._checked_step(step)))

    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        return self._read(self.sampler.rows, self._map.data_step(self._checked_step(step)))

    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        return self._read(self.sampler.rows_at, self._map.data_step(self._checked_step(step)), places)

    def _read(self, method: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Call a method of `sampler`. A `NoRowLeftError` then names the trainer's step instead of the data step."""
        try:
            return method(*arguments, **options)
        except NoRowLeftError as error:
            data_step, text = error.args
            raise NoRowLeftError(self._map.step_of(data_step), text) from None

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        first, last = (self._map.data_step(step) for step in (steps.start, steps.stop - 1))
        ranges = (range(*each) for each in self._map.read_between(first, last + 1))
        found = BatchSlots.joined(self._read(self.sampler.slots, each, hosts=hosts) for each in ranges)
        return dataclasses.replace(found, step=self._map.steps_of(found.step))

    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        if epochs is None and self.end is not None:  # search only the epochs that the stage reads
            last = self._map.data_step(self.end - 1)
            num_epochs = 1 + max(stream.begin(last + 1)[0] for stream in self.sampler.streams)
            epochs = num_epochs if self.epochs is None else min(num_epochs, self.epochs)
        slots = self.sampler.find_slots(rows, epochs=epochs, hosts=hosts)
        found = dataclasses.replace(slots, step=self._map.steps_of(slots.step))
        return found.select(np.flatnonzero((found.step >= 0) & (found.step < self.end_step)))

    @property
    def data_key(self) -> str:
        steps = f", origin={self.origin}, end_step={self.end}" if self.origin or self.end is not None else ""
        return f"MappedSampler({self.sampler.data_key}, skips={list(self.skips)}{steps})"
