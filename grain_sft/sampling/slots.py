"""BatchSlots: which rows the slots of many global batches hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from grain_sft.sampling.orders import Ints, RowsAt

if TYPE_CHECKING:
    from jaxtyping import Int64

_SCANNED = 1 << 20  # indices of an order searched together


@dataclasses.dataclass(frozen=True)
class BatchSlots:
    """Slots of global batches and their rows, as columns, int64 [slots]; ordered by step, then by slot.

    Attributes:
      step: Step, from 0.
      slot: Index into the global batch. Host h of H has slots h, h + H, h + 2H, ...; where hosts read blocks of their own
        (order "maxtext"), host h has `rows_per_host` consecutive slots.
      host: Host that reads the slot.
      source: Index of the row's stream in `sampler.streams`.
      epoch: Epoch of the row in its stream, from 0; -1 in a filled batch of a mixture.
      index: Index of the row in the order of that epoch.
      row: Number of the row in the layout; `FILL_ROW` where a filled batch has none.
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
        """Return the slots at some indices, int64 [n]."""
        return BatchSlots(*(column[at] for column in self.columns()))


def joined(found: Sequence[BatchSlots], hosts: Sequence[int] | None, num_steps: int | None) -> BatchSlots:
    """Return all slots of `found` in order: those of some hosts (None: all), of steps that the run has."""
    columns = zip([np.zeros(0, np.int64)] * 7, *(each.columns() for each in found), strict=True)
    slots = BatchSlots(*map(np.concatenate, columns))
    kept = np.ones(len(slots.step), np.bool_) if hosts is None else np.isin(slots.host, hosts)
    if num_steps is not None:
        kept &= slots.step < num_steps
    order = np.flatnonzero(kept)
    return slots.select(order[np.lexsort((slots.slot[order], slots.step[order]))])


def scan(rows_at: RowsAt, epoch: int, start: int, stop: int, rows: Ints) -> Iterator[tuple[Ints, Ints]]:
    """Yield the indices in [start, stop) of an epoch that hold one of `rows`, with the rows, a million indices at a time.

    It takes milliseconds, and seconds in order "shuffle", which is computed index by index.
    """
    for begin in range(start, stop, _SCANNED):
        indices = np.arange(begin, min(begin + _SCANNED, stop))
        found = rows_at(epoch, indices)
        hits = np.flatnonzero(np.isin(found, rows))
        yield indices[hits], found[hits]
