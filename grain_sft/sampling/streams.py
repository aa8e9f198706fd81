"""Streams of rows, read epoch after epoch, and the slots of the batches that the rows fill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.orders import ORDERS, CacheDir, Costs, Ints, RowsAt
from grain_sft.sampling.proportions import OnExhausted

if TYPE_CHECKING:
    from jaxtyping import Int64


@dataclasses.dataclass(frozen=True)
class SourceOrder:
    """Rows of one source and their order, epoch after epoch without a gap.

    Args:
      num_instances: Number of rows.
      seed: Seed of the order, 0 or more.
      order: Order, as in `IndexSampler`.
      shuffle: Whether rows are read in that order; False reads them as they are numbered.
      epochs: Number of epochs after which the source is exhausted; None means never.
      on_exhausted: What its mixture does then: "stop", "renormalize" or "fail", as in `Mixture`. None means what the mixture
        does for all of its sources.
      chunk_size: Number of consecutive rows that stay together: the order is one of chunks of that many rows, as with
        `chunk_size` of OLMo-core's data loader. Divides `num_instances`.
      start: Epoch, and index in its order, of the first row to read; (0, 0) unless an earlier stage of the run read rows.

    Raises:
      SamplerError: An argument out of bounds, or an order that does not exist.
    """

    num_instances: int
    seed: int
    order: str = "shuffle"
    shuffle: bool = True
    epochs: int | None = None
    on_exhausted: OnExhausted | None = None
    chunk_size: int = 1
    start: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        for name, least in (("num_instances", 1), ("seed", 0), ("epochs", 1), ("chunk_size", 1)):
            if name != "epochs" or self.epochs is not None:
                object.__setattr__(self, name, as_integer(name, getattr(self, name), least, SamplerError))
        if self.on_exhausted not in (None, "stop", "renormalize", "fail"):
            raise SamplerError(f"on_exhausted={self.on_exhausted!r}: a source takes stop, renormalize or fail.")
        if self.on_exhausted is not None and self.epochs is None:
            raise SamplerError(
                f"on_exhausted={self.on_exhausted!r}: the source is never exhausted. Give it max_epochs."
            )
        if self.num_instances % self.chunk_size:
            found = f"chunk_size={self.chunk_size} does not divide the {self.num_instances} rows"
            raise SamplerError(f"{found}. Take another, or the rows of a layout with max_target_sequence_length.")
        if self.start[0] < 0 or not 0 <= self.start[1] < self.num_instances:
            expected = f"expected an epoch from 0 on, and an index from 0 to {self.num_instances - 1}"
            raise SamplerError(f"start={self.start}: {expected}.")

    @property
    def num_rows(self) -> int | None:
        """Number of rows from the start to the end of the epochs, 0 if that is before; None if they never end."""
        return None if self.epochs is None else max(0, self.epochs * self.num_instances - self.rows_before)

    @property
    def rows_before(self) -> int:
        """Number of rows of all epochs before the start."""
        return self.start[0] * self.num_instances + self.start[1]

    @property
    def seeded(self) -> bool:
        """Whether the rows depend on the seed."""
        return self.shuffle and not ORDERS[self.order].sequential

    @property
    def data_key(self) -> str:
        """Text of all that decides the rows. It has the order and the seed only if rows are shuffled by a seed."""
        drawn = f"{self.order!r}, seed={self.seed}" if self.seeded else "'sequential'"
        how = "" if self.on_exhausted is None else f", on_exhausted={self.on_exhausted!r}"
        return f"SourceOrder({self.num_instances}, {drawn}, epochs={self.epochs}{how}{self.changes_text})"

    @property
    def changes_text(self) -> str:
        """Text of the chunks and the start, where they are not the default."""
        chunks = f", chunk_size={self.chunk_size}" if self.chunk_size > 1 else ""
        return chunks + (f", start={self.start}" if self.start != (0, 0) else "")

    def rows_at(self, cache_dir: CacheDir, costs: Costs | None = None) -> RowsAt:
        """Return the function that maps (epoch, indices) to rows. Only an order by cost reads `costs`, the cost of each row.

        Raises:
          SamplerError: The order is by cost, and there are no `costs`.
        """
        order, needed = ORDERS[self.order], {}
        if order.by_cost:
            if costs is None:
                expected = "Give IndexSampler costs=layout.row_costs; for a source of a mixture take another order."
                raise SamplerError(f"order={self.order!r} needs the cost of each row. {expected}")
            needed["costs"] = costs
        if not self.shuffle:
            return lambda epoch, indices: indices
        size = self.chunk_size
        made = order.make(self.num_instances // size, seed=self.seed, cache_dir=cache_dir, **needed)
        return made if size == 1 else lambda epoch, indices: made(epoch, indices // size) * size + indices % size

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of an epoch's generator."""
        return ORDERS[self.order].epoch_seed(self.seed, epoch)


class EpochSpan(NamedTuple):
    """First and last step that read rows of an epoch, number of these rows, and index in the epoch of the first of them.

    An epoch that its run does not finish, such as that of a source whose weight becomes 0, ends with the run: an amendment may
    give the source a weight again.
    """

    first: int
    last: int
    rows: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class EpochStream:
    """Part of a run with its own epochs.

    Attributes:
      name: Name of the source; "" for the one stream of an `IndexSampler`.
      source: Number of rows, order, seed and epochs.
      first_row: Number of the stream's first row among the rows of all streams.
      begin: Function of a step that returns the epoch of the step's first row, and the number of rows of that epoch in earlier
        steps.
      span: Function of an epoch that returns its `EpochSpan`; None if the run ends before the epoch.
      rows_at: Function of (epoch, indices) that returns rows of the stream, numbered from 0.
      num_blocks: Number of hosts if each reads its own block of the epoch, else 1.
      batching: Text of the rule that cuts epochs into batches, if a stage by another rule has to begin with an epoch; else "".
    """

    name: str
    source: SourceOrder
    first_row: int
    begin: Callable[[int], tuple[int, int]]
    span: Callable[[int], EpochSpan | None]
    rows_at: RowsAt
    num_blocks: int = 1
    batching: str = ""

    def first_rows(self, epoch: int, count: int) -> Ints:
        """Return the first rows, at most `count`, that the run reads in an epoch: int64 [n]."""
        span = self.span(epoch) or EpochSpan(0, 0, 0)
        return self.rows_at(epoch, span.start + np.arange(min(count, span.rows // self.num_blocks)))


@dataclasses.dataclass(frozen=True)
class BatchSlots:
    """Slots of global batches and their rows, as columns int64 [slots], sorted by step, then by slot.

    Attributes:
      step: Step, from 0.
      slot: Index into the global batch. A host that reads its own block (order "maxtext") has consecutive slots.
      host: Host that reads the slot.
      source: Index of the row's stream in `sampler.streams`.
      epoch: Epoch of the row in its stream, from 0; -1 in a filled batch of a mixture.
      index: Index of the row in the order of that epoch.
      row: Number of the row in the layout; `FILL_ROW` for a slot that a filled batch leaves empty.
    """

    step: Int64[np.ndarray, " slots"]
    slot: Int64[np.ndarray, " slots"]
    host: Int64[np.ndarray, " slots"]
    source: Int64[np.ndarray, " slots"]
    epoch: Int64[np.ndarray, " slots"]
    index: Int64[np.ndarray, " slots"]
    row: Int64[np.ndarray, " slots"]

    @classmethod
    def joined(cls, parts: Iterable[BatchSlots]) -> BatchSlots:
        """Return the slots of all `parts`, in their order."""
        return cls(*np.concatenate([np.zeros((7, 0), np.int64), *(each.columns() for each in parts)], axis=1))

    def columns(self) -> tuple[Ints, ...]:
        """Return all columns, in the order of the attributes."""
        return tuple(vars(self).values())

    def select(self, at: Ints) -> BatchSlots:
        """Return the slots at the indices `at`, int64 [n]."""
        return BatchSlots(*(column[at] for column in self.columns()))
