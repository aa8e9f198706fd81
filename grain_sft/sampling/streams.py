"""Streams of rows, read epoch after epoch, and the slots of batches that hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.errors import SamplerError
from grain_sft.sampling.orders import ORDERS, CacheDir, Ints, RowsAt

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

    Raises:
      SamplerError: An argument out of bounds, or an order that does not exist.
    """

    num_instances: int
    seed: int
    order: str = "shuffle"
    shuffle: bool = True
    epochs: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("num_instances", 1), ("seed", 0), ("epochs", 1)):
            if name != "epochs" or self.epochs is not None:
                object.__setattr__(self, name, as_integer(name, getattr(self, name), least, SamplerError))

    @property
    def num_rows(self) -> int | None:
        """Number of rows in all epochs; None if the epochs never end."""
        return None if self.epochs is None else self.epochs * self.num_instances

    @property
    def seeded(self) -> bool:
        """Whether the rows depend on the seed."""
        return self.shuffle and not ORDERS[self.order].sequential

    @property
    def data_key(self) -> str:
        """Text of all that decides the rows, without a seed that is not used."""
        drawn = f"{self.order!r}, seed={self.seed}" if self.seeded else "'sequential'"
        return f"SourceOrder({self.num_instances}, {drawn}, epochs={self.epochs})"

    def rows_at(self, cache_dir: CacheDir) -> RowsAt:
        """Return the function that maps (epoch, indices) to rows."""
        made = ORDERS[self.order].make(self.num_instances, seed=self.seed, cache_dir=cache_dir)
        return made if self.shuffle else lambda epoch, indices: indices

    def epoch_seed(self, epoch: int) -> int:
        """Return the seed of an epoch's generator."""
        return ORDERS[self.order].epoch_seed(self.seed, epoch)


class EpochSpan(NamedTuple):
    """First and last step that read rows of an epoch, the number of rows that are read, and the index of the first of them."""

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
      first_row: Number of its first row among the rows of all streams.
      begin: Function of a step that returns the epoch of its first row, and the number of rows of that epoch in earlier steps.
      span: Function of an epoch that returns its `EpochSpan`; None if the run ends before the epoch.
      rows_at: Function of (epoch, indices) that returns rows of the stream, numbered from 0.
      num_blocks: Number of hosts if each reads its own block of the epoch, else 1.
    """

    name: str
    source: SourceOrder
    first_row: int
    begin: Callable[[int], tuple[int, int]]
    span: Callable[[int], EpochSpan | None]
    rows_at: RowsAt
    num_blocks: int = 1

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

    def columns(self) -> tuple[Ints, ...]:
        """Return all columns, in the order of the attributes."""
        return tuple(vars(self).values())

    def select(self, at: Ints) -> BatchSlots:
        """Return the slots at the indices `at`, int64 [n]."""
        return BatchSlots(*(column[at] for column in self.columns()))
