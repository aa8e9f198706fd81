"""Sampler: global batches of a run, divided between hosts."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import grain
import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, FillKey
from grain_sft.sampling.batch_sizes import BatchSizes, check_divided
from grain_sft.sampling.host import Host
from grain_sft.sampling.streams import BatchSlots, EpochStream

if TYPE_CHECKING:
    from jaxtyping import Int64


class Sampler(abc.ABC):
    """Global batches whose size is a function of the step, and this host's rows of them.

    Host h of H reads slots h, h + H, h + 2H, ... of the global batch; with `host_blocks`, each host has a stream of its own.

    Attributes:
      num_instances: Number of rows to choose from.
      first_step: First step of the sampler: not 0 in a stage of a run.
      batch_sizes: Rows of the global batch of each step.
      global_batch_size: Rows of the global batch of step 0.
      host: This host.
      host_blocks: Whether each host reads its own block of an epoch. Then the global batches depend on the number of hosts.
      consecutive_slots: Whether each host reads consecutive slots of the global batch: host h of H the h-th of H equal parts.
      streams: Parts of the run that have epochs of their own: one, or each source of a mixture.
      runs_on: Whether a step may straddle epochs.
      epochs: Number of epochs after which the run ends; None where it never ends, or has sources with epochs of their own.

    Raises:
      SamplerError: Sizes that are not positive, or hosts that divide none of them.
    """

    num_instances: int
    first_step: int = 0
    runs_on: bool
    consecutive_slots: bool = False
    epochs: int | None
    streams: tuple[EpochStream, ...]

    def __init__(self, batch_sizes: BatchSizes, host: Host, *, host_blocks: bool) -> None:
        self.host, self.host_blocks = Host.checked(host), host_blocks
        self.batch_sizes, self.global_batch_size = batch_sizes, batch_sizes.sizes[0]
        self.schedule = batch_sizes.schedule
        if all(size % host.count for size in batch_sizes.sizes):
            check_divided(self.global_batch_size, host.count)
        self._shard_options = grain.sharding.NoSharding()  # grain.DataLoader reads this name

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """Number of steps of the run; None where it never ends."""

    @property
    def end_step(self) -> int:
        """Step after the last; `sys.maxsize` for a run that never ends."""
        return sys.maxsize if self.num_steps is None else self.num_steps

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

    def row_length(self, step: int) -> int | None:
        """Return the tokens of the rows of `step`, if steps have rows of several lengths; else None."""
        return None

    @property
    def changes(self) -> list[int]:
        """Steps from which a schedule holds."""
        return self.batch_sizes.steps[1:]

    def check_from(self, step: int) -> None:
        """Raise a `SamplerError` that names the first step from `step` on whose batch the hosts don't divide."""
        self.batch_sizes.check_from(step, self.host.count, self.end_step)

    def with_host(self, host: Host) -> Self:
        """Return the same run, seen from another host."""
        return type(self)(**self.__getstate__() | {"host": host})

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Sampler:
        """Return the sampler whose streams, by name, begin at an epoch and an index in its order, not at (0, 0).

        Raises:
          SamplerError: A stream has no row left, its order composes whole epochs, or the sampler cannot begin inside an epoch.
        """
        raise SamplerError("an earlier stage reads these rows, and this sampler reads whole epochs. Give another seed.")

    def reweighted(self, step: int, weights: Mapping[str, Any]) -> Self:
        """Return the same run with other weights of some sources of a mixture from `step` on; before it, nothing differs.

        Raises:
          SamplerError: The sampler is not that of a mixture, or the mixture lacks a source.
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
        return sys.maxsize if self.num_steps is None else self._num_records

    @functools.cached_property
    def _num_records(self) -> int:
        self.check_from(self.first_step)
        return sys.maxsize if self.num_steps is None else self.batch_sizes.before(self.num_steps) // self.host.count

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Record `index` of this host, counted over all its steps."""
        index = as_integer("record", index, 0, RowIndexError)
        if index >= self._num_records:
            raise RowIndexError(f"record={index}: expected 0 to {len(self) - 1}.")
        step = self.batch_sizes.step_of(index * self.host.count)
        place = index - self.batch_sizes.before(step) // self.host.count
        row = int(self.rows_at(step, np.array([place]))[0])
        return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW) if row == FILL_ROW else row)

    def _checked_step(self, step: int) -> int:
        step = as_integer("step", step, 0, RowIndexError)
        if step < self.first_step or (self.num_steps is not None and step >= self.num_steps):
            end = "on" if self.num_steps is None else f"to {self.num_steps - 1}"
            raise RowIndexError(f"step={step}: expected {self.first_step} {end}.")
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
