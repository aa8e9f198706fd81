"""`Sampler`, the base class of all samplers."""

from __future__ import annotations

import abc
import functools
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import grain
import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW, FillKey
from grain_sft.sampling.batch_sizes import BatchSizes, check_divided
from grain_sft.sampling.host import Host
from grain_sft.sampling.streams import BatchSlots, EpochStream

if TYPE_CHECKING:
    from jaxtyping import Int64


class Sampler(abc.ABC):
    """Base of samplers. A sampler chooses the rows of each step's global batch, and divides them among the hosts.

    A slot is a place in the global batch, from 0. By default, host h of H reads slots h, h + H, h + 2H, ...

    Attributes:
      num_instances: Number of rows to choose from.
      first_step: First step of the sampler, above 0 in a later stage of a run.
      batch_sizes: Number of rows in the global batch of each step.
      schedule: Changes of the batch size: pairs (step, global_batch_size).
      global_batch_size: Number of rows in the first step's global batch. In a `CurriculumSampler`, number of rows in a batch of
        the longest rows.
      host: This host.
      host_blocks: Whether each host reads its own block of an epoch. If so, global batches depend on the number of hosts.
      consecutive_slots: Whether each host reads consecutive slots of the global batch: host 1 of 4 reads slots 8 to 15 of 32.
      streams: One `EpochStream`; in a mixture, one for each source.
      runs_on: Whether a step may have rows of two epochs.
      epochs: Number of epochs after which the run ends. None if the run never ends, or if each source of a mixture has its own
        number of epochs.
      failing_step: First step that fails, because a source of a mixture has no row left and its `on_exhausted` is "fail";
        `sys.maxsize` if no step fails.

    Raises:
      SamplerError: The number of hosts divides none of the batch sizes.
      WrongTypeError: `host` is not a `Host`.
    """

    num_instances: int
    first_step: int = 0
    runs_on: bool = True
    host_blocks: bool = False
    consecutive_slots: bool = False
    epochs: int | None = None
    failing_step: int = sys.maxsize
    streams: tuple[EpochStream, ...]

    def __init__(self, batch_sizes: BatchSizes, host: Host) -> None:
        check_type("host", host, Host, "Host(index, count)")
        self.host, self.batch_sizes = host, batch_sizes
        self.global_batch_size, self.schedule = batch_sizes.sizes[0], batch_sizes.schedule
        # one size that is a multiple of `host.count` is enough here: `check_from` and `rows` check the steps that are read
        if all(size % host.count for size in batch_sizes.sizes):
            check_divided(self.global_batch_size, host.count)
        self._shard_options = grain.sharding.NoSharding()  # grain.DataLoader reads this attribute

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """Number of steps of the run; None if the run never ends."""

    @property
    def end_step(self) -> int:
        """Step after the last step of the run; `sys.maxsize` if the run never ends."""
        return sys.maxsize if self.num_steps is None else self.num_steps

    @property
    def end_of_batches(self) -> int:
        """Step after the last one that has a batch: `end_step`, or `failing_step` if it comes first."""
        return min(self.end_step, self.failing_step)

    @property
    def steps_per_epoch(self) -> int | None:
        """Number of steps of the first whole epoch. None in a mixture, and in a run that has stages or skips steps."""
        return None

    @property
    @abc.abstractmethod
    def data_key(self) -> str:
        """All that decides the global batches, as one line of text that is the same on all hosts."""

    @property
    def receipt(self) -> str:
        """Text like `data_key`, for receipts. Its seed is 0 if the order uses no seed."""
        return self.data_key

    @abc.abstractmethod
    def steps_of_epochs(self, epochs: int | None) -> int:
        """Return the number of steps, from step 0 on, that read the first `epochs` epochs.

        None means the epochs of the run. If the run never ends, it means the epochs up to the one in which the sampler starts:
        only epoch 0, except in a later stage of a run. More epochs than the run has are a `SamplerError`. If the last step also
        reads rows of the next epoch, only a mixture includes it in the number.
        """

    @abc.abstractmethod
    def rows(self, step: int) -> Int64[np.ndarray, " rows"]:
        """Return the rows of `step` that this host reads: int64 [batch size of `step` // host.count].

        Raises:
          RowIndexError: `step` is before the first step, or after the last.
          SamplerError: The number of hosts does not divide the batch size of `step`.
        """

    @abc.abstractmethod
    def rows_at(self, step: int, places: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Return `rows(step)[places]`, int64 [n], without computing the other rows. Errors are those of `rows`."""

    @abc.abstractmethod
    def slots(self, steps: range, *, hosts: Sequence[int] | None = None) -> BatchSlots:
        """Return the slots that `hosts` (None: all) read in consecutive `steps`. Steps out of range are a RowIndexError."""

    @abc.abstractmethod
    def find_slots(
        self, rows: Int64[np.ndarray, " rows"], *, epochs: int | None = None, hosts: Sequence[int] | None = None
    ) -> BatchSlots:
        """Return the slots that hold any of `rows`.

        The search computes the row at every index of every epoch. In order "shuffle", this takes seconds.

        Args:
          rows: Numbers of the rows to find.
          epochs: Number of epochs to search, counted from epoch 0. None means all epochs that have batches;
            of a source that is read without end, only the epoch in which the sampler starts.
          hosts: Hosts whose slots are returned; None means all hosts.

        Raises:
          SamplerError: More epochs than the run has.
        """

    def row_length(self, step: int) -> int | None:
        """Return the number of tokens of the rows of `step`; None if the rows of all steps have the same length."""
        return None

    @property
    def changes(self) -> list[int]:
        """Steps at which a schedule changes the batch size or the weights of sources, and steps at which data are skipped."""
        return self.batch_sizes.steps[1:]

    def check_from(self, step: int) -> None:
        """Raise a `SamplerError` if the number of hosts does not divide the batch size of `step` or of a later step."""
        self.batch_sizes.check_from(step, self.host.count, self.end_step)

    def with_host(self, host: Host) -> Self:
        """Return a sampler of the same run for another host."""
        return self._with(host=host)

    def continued(self, starts: Mapping[str, tuple[int, int]]) -> Sampler:
        """Return a sampler that begins after the rows that earlier stages of the run read.

        Args:
          starts: Pair (epoch, index) for the first unread row of each stream, by the stream's name. The index is an index in
            the order of the epoch. A stream that `starts` does not name begins at (0, 0).

        Raises:
          SamplerError: A stream has no row left, or cannot begin inside an epoch.
        """
        raise SamplerError("this sampler can't begin where an earlier stage ended. Give this stage another seed.")

    def reweighted(self, changes: Sequence[tuple[int, Mapping[str, Any]]]) -> Self:
        """Return a copy of this sampler, with other weights for some sources of the mixture.

        Args:
          changes: Pairs (step, weights by name), with ascending steps, as in `Mixture.reweighted`.

        Raises:
          SamplerError: This is not the sampler of a mixture, or `changes` has a name that is not a source of the mixture.
        """
        problem = f"reweight {', '.join(changes[0][1])}: a run of one corpus has no weights"
        raise SamplerError(f"{problem}. Take the amendment out, or make a mixture.")

    @functools.cached_property
    def rows_per_host(self) -> int:
        """Number of rows that this host reads from a batch of `global_batch_size` rows."""
        # the last argument is the step that an error names: None if all steps have this size
        check_divided(self.global_batch_size, self.host.count, 0 if self.schedule else None)
        return self.global_batch_size // self.host.count

    def _checked_epochs(self, epochs: int | None) -> int | None:
        epochs = None if epochs is None else as_integer("epochs", epochs, 1, SamplerError)
        if epochs is not None and self.epochs is not None and epochs > self.epochs:
            raise SamplerError(f"epochs={epochs}: expected at most {self.epochs}, the epochs of the run.")
        return epochs

    def __len__(self) -> int:
        """Return the number of rows that this host reads in the run; `sys.maxsize` if the run never ends."""
        return sys.maxsize if self.num_steps is None else self._num_records

    @functools.cached_property
    def _num_records(self) -> int:
        self.check_from(self.first_step)
        return sys.maxsize if self.num_steps is None else self.batch_sizes.before(self.num_steps) // self.host.count

    def __getitem__(self, index: int) -> grain.RecordMetadata:
        """Return record `index` of this host. A record is one row: first those of step 0, then those of step 1, and so on."""
        index = as_integer("record", index, 0, RowIndexError)
        if index >= self._num_records:
            raise RowIndexError(f"record={index}: expected 0 to {len(self) - 1}.")
        # `_num_records` checked that the hosts divide the batch sizes, so all hosts have the same number of rows before a step
        step = self.batch_sizes.step_of(index * self.host.count)
        place = index - self.batch_sizes.before(step) // self.host.count
        row = int(self.rows_at(step, np.array([place]))[0])
        return grain.RecordMetadata(index=index, record_key=FillKey(FILL_ROW) if row == FILL_ROW else row)

    def _checked_step(self, step: int) -> int:
        step = as_integer("step", step, 0, RowIndexError)
        if step < self.first_step or (self.num_steps is not None and step >= self.num_steps):
            end = "or more" if self.num_steps is None else f"to {self.num_steps - 1}"
            raise RowIndexError(f"step={step}: expected {self.first_step} {end}.")
        return step

    def _check_steps(self, steps: range) -> None:
        check_type("steps", steps, range, "a range of steps")
        for step in (*steps[:1], *steps[-1:]):
            self._checked_step(step)

    def _with(self, **changes: Any) -> Self:
        """Return a copy of this sampler, with `changes` to the arguments of its constructor."""
        return type(self)(**self.__getstate__() | changes)

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments of the constructor. Each of them is an attribute of the same name."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        """Return only what decides this host's rows, because Grain compares the text when it restores an iterator."""
        return f"{self.data_key}[{self.host!r}]"

    @property
    def _schedule_text(self) -> str:
        return f", schedule={list(self.schedule)}" if self.schedule else ""
