"""Sampler: global batches of a run, divided between hosts."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import grain
import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import GrainSftError, RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, FillKey
from grain_sft.sampling.batch_sizes import BatchSizes, check_divided
from grain_sft.sampling.host import Host
from grain_sft.sampling.orders import Ints
from grain_sft.sampling.streams import BatchSlots, EpochStream

if TYPE_CHECKING:
    from jaxtyping import Int64

_STEPS_AT_ONCE = 64
_ROWS_AT_ONCE = 1 << 11
_INDICES_AT_ONCE = 1 << 20  # of an order that is searched


class Sampler(abc.ABC):
    """Global batches whose size is a function of the step, and this host's rows of them.

    Host h of H reads slots h, h + H, h + 2H, ... of the global batch; with `host_blocks`, each host has a stream of its own.

    Attributes:
      num_instances: Number of rows to choose from.
      batch_sizes: Rows of the global batch of each step.
      global_batch_size: Rows of the global batch of step 0.
      host: This host.
      host_blocks: Whether each host reads its own block of an epoch. Then the global batches depend on the number of hosts.
      streams: Parts of the run that have epochs of their own: one, or each source of a mixture.
      runs_on: Whether a step may straddle epochs.
      epochs: Number of epochs after which the run ends; None where it never ends, or has sources with epochs of their own.

    Raises:
      SamplerError: Sizes that are not positive, or hosts that divide none of them.
    """

    num_instances: int
    runs_on: bool
    epochs: int | None
    streams: tuple[EpochStream, ...]

    def __init__(
        self, global_batch_size: int, schedule: Iterable[tuple[int, int]], host: Host, *, host_blocks: bool
    ) -> None:
        self.host = Host.checked(host)
        self.host_blocks = host_blocks
        self.batch_sizes = BatchSizes(global_batch_size, schedule)
        self.schedule = self.batch_sizes.schedule
        self.global_batch_size = self.batch_sizes.sizes[0]
        if all(size % host.count for size in self.batch_sizes.sizes):
            check_divided(self.global_batch_size, host.count)
        self._shard_options = grain.sharding.NoSharding()  # grain.DataLoader reads this name

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """Number of steps of the run; None where it never ends."""

    @property
    @abc.abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch; None where sources have epochs of their own."""

    @property
    @abc.abstractmethod
    def data_key(self) -> str:
        """All that decides the global batches, in one line. It is part of iterator states."""

    @property
    def receipt(self) -> str:
        """All that decides the rows of all hosts together, in one line: no seed where none is used."""
        return self.data_key

    @abc.abstractmethod
    def steps_of_epochs(self, epochs: int | None) -> int:
        """Return the number of steps that read `epochs` epochs; None means those of the run, or one if it never ends. More
        epochs than the run has are a `SamplerError`."""

    @abc.abstractmethod
    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        """Return the rows of `step` (from 0) that this host reads: int64 [global_batch_size // host.count].

        Raises:
          RowIndexError: A negative step, or one after the last.
          SamplerError: The hosts don't divide the batch of this step of a schedule.
        """

    @abc.abstractmethod
    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return `rows(step)[places]`, int64 [n], without computing the other rows. Raises as `rows(step)[places]` does."""

    @abc.abstractmethod
    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        """Return the slots of `steps`, consecutive steps of the run, that some `hosts` read; None means all hosts."""

    @abc.abstractmethod
    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        """Return the slots of `hosts` (None means all) that hold `rows`, int64 [n].

        Searches every index of the order of the first `epochs` epochs (None means those of the run, or one where it never
        ends), which takes seconds in order "shuffle". More epochs than the run has are a `SamplerError`.
        """

    @property
    def changes(self) -> list[int]:
        """Steps from which a schedule holds."""
        return self.batch_sizes.steps[1:]

    def check_from(self, step: int) -> None:
        """Raise a `SamplerError` that names the first step from `step` on whose batch the hosts don't divide."""
        self.batch_sizes.check_from(step, self.host.count)

    def with_host(self, host: Host) -> Self:
        """Return the same run, seen from another host."""
        return type(self)(**self.__getstate__() | {"host": host})

    def reweighted(self, step: int, weights: Mapping[str, Any]) -> Self:
        """Return the same run with other weights of some sources of a mixture from `step` on; before it, nothing differs.

        Raises:
          SamplerError: the sampler is not of a mixture, or the mixture does not have a source.
        """
        raise SamplerError(f"reweight {', '.join(weights)}: one corpus has no weights. Take it out, or make a mixture.")

    @functools.cached_property
    def rows_per_host(self) -> int:
        """Rows that this host reads in a step; with a schedule, in step 0."""
        check_divided(self.global_batch_size, self.host.count, 0 if self.schedule else None)
        return self.global_batch_size // self.host.count

    def _checked_epochs(self, epochs: int | None) -> int | None:
        epochs = None if epochs is None else as_integer("epochs", epochs, 1, SamplerError)
        if epochs is not None and self.epochs is not None and epochs > self.epochs:
            raise SamplerError(f"epochs={epochs}: the sampler has {self.epochs}.")
        return epochs

    def __len__(self) -> int:
        """Records of this host: `sys.maxsize` where they never end."""
        return sys.maxsize if self.num_steps is None else self._host_sizes.before(self.num_steps)

    @functools.cached_property
    def _host_sizes(self) -> BatchSizes:
        return self.batch_sizes.shared(self.host.count)

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Record `index` of this host, counted over all its steps."""
        index = as_integer("record", index, 0, RowIndexError)
        if index >= len(self):
            raise RowIndexError(f"record={index}: expected 0 to {len(self) - 1}.")
        step = self._host_sizes.step_of(index)
        row = int(self.rows_at(step, np.array([index - self._host_sizes.before(step)]))[0])
        return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW) if row == FILL_ROW else row)

    def _checked_step(self, step: int) -> int:
        step = as_integer("step", step, 0, RowIndexError)
        if self.num_steps is not None and step >= self.num_steps:
            raise RowIndexError(f"step={step}: expected 0 to {self.num_steps - 1}.")
        return step

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        """What decides this host's rows and nothing else: Grain compares this when it restores an iterator."""
        return f"{self.data_key}[{self.host!r}]"

    @property
    def _schedule_text(self) -> str:
        return f", schedule={list(self.schedule)}" if self.schedule else ""


class StreamSampler(Sampler):
    """A sampler that reads streams of rows."""

    def __init__(
        self, global_batch_size: int, schedule: Iterable[tuple[int, int]], host: Host, *, host_blocks: bool
    ) -> None:
        super().__init__(global_batch_size, schedule, host, host_blocks=host_blocks)
        self._at_once: tuple[int, list[Ints | None]] = (0, [])  # a step, and the rows of steps from it on
        self._last_step = -1
        self._indices = functools.lru_cache(maxsize=8)(self._indices_of)

    @abc.abstractmethod
    def _rows(self, step: int, indices: Ints) -> Ints:
        """Return the rows at `indices` of the host's stream, counted from its begin in `step`; `FILL_ROW` past the end."""

    @abc.abstractmethod
    def _slots(self, steps: Ints, which: Ints, slot: Ints, host: Ints) -> BatchSlots:
        """Return the rows of `slot` of `steps[which]`, which `host` reads."""

    @abc.abstractmethod
    def _find(self, source: int, epoch: int, indices: Ints) -> tuple[Ints, Ints, Ints]:
        """Return step, slot and host of each index of a stream's epoch: int64 [n]; step -1 where none reads it."""

    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        first, ahead = self._at_once
        if type(step) is int and 0 <= step - first < len(ahead):
            rows, ahead[step - first] = ahead[step - first], None  # each is handed out once: it can be written to
            if rows is not None:
                return rows
        step = self._checked_step(step)
        indices = self._indices(self.batch_sizes.at(step))
        last, self._last_step = self._last_step, step
        found = self._rows_at_once(step, indices) if abs(step - last) == 1 else None
        return self._rows(step, indices) if found is None else found

    def _rows_at_once(self, step: int, indices: Ints) -> Ints | None:
        """Return the rows of `step` and keep those of later steps, at 0.7 us a step instead of 5 to 8; None if that fails."""
        size = self.batch_sizes.at(step)
        count = min(_STEPS_AT_ONCE, _ROWS_AT_ONCE // max(1, len(indices)), self._steps_of_one_size(step, size))
        if count <= 1:
            return None
        apart = len(indices) if self.host_blocks else size
        several = (indices + apart * np.arange(count)[:, np.newaxis]).reshape(-1)
        try:
            made: list[Ints | None] = list(self._rows(step, several).reshape(count, -1))
        except GrainSftError:  # of a later epoch, which the caller has not asked for
            return None
        found, made[0] = made[0], None
        self._at_once = step, made
        return found

    def _steps_of_one_size(self, step: int, size: int) -> int:
        """Return a number of steps of `size` rows from `step` on whose rows follow each other in the stream."""
        count = self.batch_sizes.steps_of_one_size(step)
        return count if self.num_steps is None else min(count, self.num_steps - step)

    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        step = self._checked_step(step)
        return self._rows(step, self._indices(self.batch_sizes.at(step))[places])

    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        numbers = np.arange(steps.start, steps.stop)
        sizes, count = self.batch_sizes.begins(numbers)[1], self.host.count
        which = np.arange(len(numbers)).repeat(sizes)
        slot = np.arange(len(which)) - (np.cumsum(sizes) - sizes).repeat(sizes)
        host = slot // (sizes[which] // count) if self.host_blocks else slot % count
        if hosts is not None and len(hosts) < count:
            kept = np.isin(host, np.array(hosts, np.int64))
            which, slot, host = which[kept], slot[kept], host[kept]
        return self._slots(numbers, which, slot, host)

    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        found = np.concatenate([np.zeros((7, 0), np.int64), *self._found(rows, self._checked_epochs(epochs))], axis=1)
        step, slot, host = found[:3]
        kept = (step >= 0) & (step < (sys.maxsize if self.num_steps is None else self.num_steps))
        order = np.flatnonzero(kept if hosts is None else kept & np.isin(host, hosts))
        return BatchSlots(*found[:, order[np.lexsort((slot[order], step[order]))]])

    def _found(self, rows: Ints, epochs: int | None) -> Iterator[Ints]:
        """Yield the columns of the slots that hold `rows`, a million indices of an order at a time."""
        for number, stream in enumerate(self.streams):
            end = stream.source.num_instances
            mine = rows[(rows >= stream.first_row) & (rows < stream.first_row + end)] - stream.first_row
            for epoch in range(epochs or stream.source.epochs or 1) if len(mine) else ():
                for begin in range(0, end, _INDICES_AT_ONCE):
                    indices = np.arange(begin, min(begin + _INDICES_AT_ONCE, end))
                    read = stream.rows_at(epoch, indices)
                    hits = np.isin(read, mine)
                    places = self._find(number, epoch, indices[hits])
                    columns = (*places, number, epoch, indices[hits], read[hits] + stream.first_row)
                    yield np.array(np.broadcast_arrays(*columns), np.int64)

    def _indices_of(self, size: int) -> Ints:
        """Return the indices of this host's rows in a step of `size` rows, from the begin of the step in its stream."""
        count = self.host.count
        check_divided(size, count)
        counting = np.arange(size // count)
        return counting if self.host_blocks else self.host.index + count * counting
