"""Batches: what samplers have in common, namely how the global batches of a run are divided between hosts."""

from __future__ import annotations

import abc
import functools
import sys
from collections.abc import Iterable
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_integer
from grain_sft.errors import GrainSftError, RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, FillKey
from grain_sft.sampling.batch_sizes import BatchSizes, check_divided
from grain_sft.sampling.host import Host

Ints = npt.NDArray[np.int64]

_STEPS_AT_ONCE = 64
_ROWS_AT_ONCE = 1 << 11


class Batches(abc.ABC):
    """Global batches whose size is a function of the step, and one host's part of them.

    Attributes:
      batch_sizes: rows of the global batch of each step.
      global_batch_size: those of step 0.
      host: which host this is.
      num_instances: rows there are to choose from.

    Raises:
      SamplerError: no such sizes, or hosts that divide none of them.
    """

    num_instances: int
    num_steps: int | None

    def __init__(
        self, global_batch_size: int, schedule: Iterable[tuple[int, int]], host: Host, *, blocks: bool
    ) -> None:
        if not isinstance(host, Host):
            raise SamplerError(f"host={host!r}: expected Host(index, count).")
        self.host = host
        self.batch_sizes = BatchSizes(global_batch_size, schedule)
        self.global_batch_size = self.batch_sizes.sizes[0]
        if all(size % host.count for size in self.batch_sizes.sizes):
            check_divided(self.global_batch_size, host.count)
        self._at_once: tuple[int, list[Ints | None]] = (0, [])  # a step, and the rows of steps from it on
        self._last_step = -1
        self._blocks = blocks  # hosts read blocks of streams of their own; else stripes of the step
        self._offsets = functools.lru_cache(maxsize=8)(self._offsets_of)
        self._shard_options = grain.sharding.NoSharding()  # where grain.DataLoader looks for it

    @functools.cached_property
    def rows_per_host(self) -> int:
        """Rows that this host reads in a step; with a schedule, in step 0.

        Raises:
          SamplerError: the hosts don't divide the batch of step 0.
        """
        check_divided(self.global_batch_size, self.host.count, 0 if self.batch_sizes.schedule else None)
        return self.global_batch_size // self.host.count

    def check_from(self, step: int) -> None:
        """Refuse to run from `step` on with hosts that don't divide the batch of some step.

        Raises:
          SamplerError: naming the first such step.
        """
        self.batch_sizes.check_from(step, self.host.count)

    def rows(self, step: int) -> Ints:
        """Rows that this host reads at `step` (from 0): int64 [global_batch_size // host.count].

        Raises:
          RowIndexError: a negative step, or one after the last.
          SamplerError: the hosts don't divide the batch of this step, of a schedule.
        """
        first, ahead = self._at_once
        if type(step) is int and 0 <= step - first < len(ahead):
            rows, ahead[step - first] = ahead[step - first], None  # each is handed out once: it can be written to
            if rows is not None:
                return rows
        step = self._checked_step(step)
        size = self.batch_sizes.at(step)
        offsets = self._offsets(size)
        last, self._last_step = self._last_step, step
        if abs(step - last) == 1:  # one step after the other, as a rule: some at once are computed faster
            count = min(_STEPS_AT_ONCE, _ROWS_AT_ONCE // max(1, len(offsets)), self._steps_alike(step, size))
            if count > 1 and (found := self._rows_at_once(step, offsets, size, count)) is not None:
                return found
        return self._rows(step, offsets)

    def _rows_at_once(self, step: int, offsets: Ints, size: int, count: int) -> Ints | None:
        """Return the rows of `step` and keep those of the `count` - 1 steps after it; None where these can't be computed."""
        apart = len(offsets) if self._blocks else size
        several = (offsets + apart * np.arange(count)[:, np.newaxis]).reshape(-1)
        try:
            made: list[Ints | None] = list(self._rows(step, several).reshape(count, -1))
        except GrainSftError:  # of a later epoch, which nobody asked for yet
            return None
        found, made[0] = made[0], None
        self._at_once = step, made
        return found

    def _steps_alike(self, step: int, size: int) -> int:
        """So many steps from `step` on, at least, have rows one after the other in the stream, each `size` of all hosts."""
        count = self.batch_sizes.alike(step)
        return count if self.num_steps is None else min(count, self.num_steps - step)

    def rows_at(self, step: int, places: Ints) -> Ints:
        """Some of `rows(step)`, without computing the others: int64 [len(places)].

        Args:
          step: from 0.
          places: int64 [n], each from 0 to one less than this host's rows in the step.

        Raises: as `rows`; IndexError for a place that the step does not have.
        """
        step = self._checked_step(step)
        return self._rows(step, self._offsets(self.batch_sizes.at(step))[places])

    @abc.abstractmethod
    def _rows(self, step: int, offsets: Ints) -> Ints:
        """The rows at `offsets` of the stream from `step` on; `FILL_ROW` where there is none."""

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
        offset = int(self._offsets(self.batch_sizes.at(step))[index - self._host_sizes.before(step)])
        row = self._row(step, offset)
        return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW) if row is None else row)

    @abc.abstractmethod
    def _row(self, step: int, offset: int) -> int | None:
        """The row at `offset` of the stream from `step` on; None where there is none."""

    def _checked_step(self, step: int) -> int:
        step = as_integer("step", step, 0, RowIndexError)
        if self.num_steps is not None and step >= self.num_steps:
            raise RowIndexError(f"step={step}: expected 0 to {self.num_steps - 1}.")
        return step

    @property
    @abc.abstractmethod
    def data_key(self) -> str:
        """What decides the global batches."""

    def __repr__(self) -> str:
        """What decides this host's rows and nothing else: Grain compares this when it restores an iterator."""
        return f"{self.data_key}[{self.host!r}]"

    @property
    def _stated_schedule(self) -> str:
        """The schedule, as it stands in `data_key`."""
        return f", schedule={list(self.batch_sizes.schedule)}" if self.batch_sizes.schedule else ""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _offsets_of(self, size: int) -> Ints:
        """Of this host's rows in a step of `size` rows, in the stream that they are taken from."""
        count = self.host.count
        check_divided(size, count)
        counting = np.arange(size // count)
        return counting if self._blocks else self.host.index + count * counting
