"""StepMap and MappedSampler: which data step each step of the trainer reads, where a run skips some or has stages."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from bisect import bisect_left, bisect_right
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

    Raises:
      SamplerError: A `step` below 0, a `num_steps` below 1, or steps beyond int64.
    """

    def __init__(self, skips: Iterable[tuple[int, int]], origin: int = 0) -> None:
        self._steps, self._skipped = [origin], [-origin]
        """`origin` and the trainer's later steps with a skip before them; and, from each on, data step minus trainer's step."""
        for first, count in sorted(skips):
            step = as_integer("skip: from", first, 0, SamplerError)
            if step > self._steps[-1]:
                self._steps.append(step)
                self._skipped.append(self._skipped[-1])
            self._skipped[-1] += as_integer("skip: steps", count, 1, SamplerError)
        self._data = [step + skipped for step, skipped in zip(self._steps, self._skipped, strict=True)]
        if max(self._steps[-1], self._data[-1]) > sys.maxsize:
            raise SamplerError(f"skip: step {self._steps[-1]} would read data step {self._data[-1]}. Skip fewer steps.")
        self._columns = np.array([self._steps, self._skipped, self._data], np.int64)

    @property
    def steps(self) -> list[int]:
        """`origin` and the later steps of the trainer before which data steps are skipped, ascending."""
        return self._steps

    def data_step(self, step: int) -> int:
        """Return the data step that the trainer's `step` reads; a step before `origin` counts back from that of `origin`."""
        return step + self._skipped[max(0, bisect_right(self._steps, step) - 1)]

    def step_of(self, data_step: int) -> int:
        """Return the first step of the trainer that reads `data_step` or a later one."""
        entry = bisect_right(self._data, data_step) - 1
        step = data_step - self._skipped[entry] if entry >= 0 else self._steps[0]
        return min(step, self._steps[entry + 1]) if entry + 1 < len(self._steps) else step

    def steps_of(self, data_steps: Ints) -> Ints:
        """Return int64 [n], the trainer's step that reads each of `data_steps`, int64 [n]; -1 for a skipped data step."""
        entry = np.searchsorted(self._columns[2], data_steps, side="right") - 1
        steps = data_steps - self._columns[1, entry]
        ends = np.append(self._columns[0, 1:], sys.maxsize)
        return np.where((entry >= 0) & (data_steps >= 0) & (steps < ends[entry]), steps, -1)

    def skipped_between(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each range of skipped data steps within [first, end)."""
        before = -self._steps[0]
        for step, skipped in zip(self._steps, self._skipped, strict=True):
            begin, stop = max(first, step + before), min(end, step + skipped)
            if begin < stop:
                yield begin, stop
            before = skipped


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

    def __init__(
        self,
        sampler: Sampler,
        skips: Iterable[tuple[int, int]] = (),
        *,
        origin: int = 0,
        end: int | None = None,
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

        def before(epoch: int, data_step: int, found: EpochSpan) -> int:
            """Return the number of rows of `found`, the span of `epoch`, that data steps before `data_step` read."""
            epoch_at, rows_into = stream.begin(data_step)
            if epoch_at == epoch:
                return rows_into - found.start * stream.num_blocks
            return found.rows if epoch_at > epoch else 0

        def span(epoch: int) -> EpochSpan | None:
            found = stream.span(epoch)
            if found is None or (found.last == sys.maxsize and self.num_steps is None):
                return found and found._replace(first=self._map.step_of(found.first))
            last = self.end_step if found.last == sys.maxsize else self._map.step_of(found.last + 1)
            steps = range(self._map.step_of(found.first), min(last, self.end_step))
            if steps.start >= self.end_step:
                return None
            ranges = list(self._map.skipped_between(found.first, min(found.last, sys.maxsize - 1) + 1))
            skipped = [before(epoch, end, found) - before(epoch, begin, found) for begin, end in ranges]

            def read(step: int) -> int:
                """Return the number of rows of the span that the trainer's steps up to `step` read."""
                data_step = self._map.data_step(step)
                skipped_rows = sum(rows for (_, end), rows in zip(ranges, skipped, strict=True) if end <= data_step)
                return before(epoch, data_step + 1, found) - skipped_rows

            rows = read(steps[-1]) if steps else 0
            if not rows:
                return EpochSpan(steps.start, steps.start - 1, 0)
            first, last = (steps[bisect_left(steps, least, key=read)] for least in (1, rows))
            start = before(epoch, self._map.data_step(first), found)
            return EpochSpan(first, last, rows, found.start + start // stream.num_blocks)

        return dataclasses.replace(stream, begin=begin, span=span)

    def _mapped(self, sampler: Sampler) -> MappedSampler:
        return MappedSampler(sampler, self.skips, origin=self.origin, end=self.end)

    def with_host(self, host: Host) -> MappedSampler:
        return self._mapped(self.sampler.with_host(host))

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> MappedSampler:
        return self._mapped(self.sampler.continued(starts))

    def reweighted(self, step: int, weights: Mapping[str, Any]) -> MappedSampler:
        return self._mapped(self.sampler.reweighted(max(0, self._map.data_step(step)), weights))

    @functools.cached_property
    def num_steps(self) -> int | None:
        ends = [self.end, None if self.sampler.num_steps is None else self._map.step_of(self.sampler.num_steps)]
        return min((end for end in ends if end is not None), default=None)

    @property
    def steps_per_epoch(self) -> int | None:
        """None, because an epoch with skipped steps has fewer steps than others."""
        return None

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
            raise NoRowLeftError(error.message, self._map.step_of(error.step)) from None

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        inner = [step for step in self._map.steps if steps.start < step < steps.stop]
        found = [np.zeros((7, 0), np.int64)]
        for first, end in itertools.pairwise([steps.start, *inner, steps.stop]):
            shift = self._map.data_step(first) - first
            slots = self._read(self.sampler.slots, range(first + shift, end + shift), hosts=hosts)
            found.append(np.array([slots.step - shift, *slots.columns()[1:]]))
        return BatchSlots(*np.concatenate(found, axis=1))

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
