"""Order: which row is at each index of an epoch, with all that the package must know of it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import SamplerError

Ints = npt.NDArray[np.int64]
CacheDir = str | os.PathLike[str] | None
RowsAt = Callable[[int, Ints], Ints]
"""Rows at some indices of an epoch: called with the epoch, from 0, and int64 [n]; returns int64 [n]."""

EPOCHS_KEPT = 2  # a batch may straddle two


class Costs(NamedTuple):
    """Costs of rows, and the steps that they are read in.

    Attributes:
      rows: Function that returns the cost of each row, int64 [num_rows].
      cuts: Function of an epoch that returns the index at which each of its steps begins, and the one after the last index
        that is read: int64 [steps + 1].
    """

    rows: Callable[[], Ints]
    cuts: Callable[[int], Ints]


class MakeOrder(Protocol):
    """Maker of an order of `num_rows` rows. It raises `SamplerError` for a number of rows or a seed that it cannot take."""

    def __call__(self, num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt: ...


@dataclasses.dataclass(frozen=True)
class Order:
    """Entry of the table of orders.

    Args:
      make: Makes the order of a number of rows, as a `MakeOrder`; with `by_cost` it also takes `costs: Costs`. Over all
        indices of an epoch it has every row once.
      host_blocks: Whether host h reads the h-th contiguous block of each epoch, rather than rows h, h + H, ... of each
        batch. Then batches depend on the number of hosts.
      runs_on: Whether batches straddle epochs, whatever `last_batch` is.
      sequential: Whether rows are read as they are numbered, so that no seed is used.
      by_cost: Whether the order takes the `Costs` of the rows. Sources of a mixture, whose rows share steps, cannot have it.
      epoch_seed: Seed of an epoch's generator, from the run's seed and the epoch, for the audit log.
    """

    make: Callable[..., RowsAt]
    host_blocks: bool = False
    runs_on: bool = False
    sequential: bool = False
    by_cost: bool = False
    epoch_seed: Callable[[int, int], int] = lambda seed, epoch: seed

    @classmethod
    def from_permutation(cls, permutation: Callable[[int, int, int], Any], **traits: Any) -> Order:
        """Return an order with `traits`, the other fields, that is kept in memory, an epoch at a time.

        `permutation` is a function of (seed, epoch, num_rows) that returns every row once: integers [num_rows], the same
        on every machine.
        """

        def make(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
            @functools.lru_cache(maxsize=EPOCHS_KEPT)
            def rows_of(epoch: int) -> Ints:
                rows = np.asarray(permutation(seed, epoch, num_rows))
                if rows.shape != (num_rows,) or not np.array_equal(np.sort(rows), np.arange(num_rows)):
                    raise SamplerError(f"order {permutation!r}, epoch {epoch}: expected each of {num_rows} rows once.")
                return rows.astype(np.int64)

            return lambda epoch, indices: rows_of(epoch)[indices]

        return cls(make, **traits)

    @classmethod
    def of(cls, entry: Order | Callable[[int, int, int], Any]) -> Order:
        """Return `entry`, or the order of a bare function of (seed, epoch, num_rows)."""
        return entry if isinstance(entry, cls) else cls.from_permutation(entry)  # type: ignore[arg-type]
