"""Order: which row is at each index of an epoch, with all that the package must know of it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import SamplerError

Ints = npt.NDArray[np.int64]
CacheDir = str | os.PathLike[str] | None
RowsAt = Callable[[int, Ints], Ints]
"""Rows at some indices of an epoch: called with the epoch, from 0, and int64 [n]; returns int64 [n]."""

EPOCHS_KEPT = 2  # a batch may straddle two


class MakeOrder(Protocol):
    """Makes an order of `num_rows` rows. Raises `SamplerError` for a number of rows or a seed that it cannot take."""

    def __call__(self, num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt: ...


@dataclasses.dataclass(frozen=True)
class Order:
    """Entry of the table of orders.

    Args:
      make: Makes the order of a number of rows. Over all indices of an epoch it has every row once.
      host_blocks: Whether host h reads the h-th contiguous block of each epoch, rather than rows h, h + H, ... of each
        batch. Then batches depend on the number of hosts.
      runs_on: Whether batches straddle epochs, whatever `last_batch` is.
      sequential: Whether rows are read as they are numbered, so that no seed is used.
      epoch_seed: Seed of an epoch's generator, from the run's seed and the epoch, for the audit log.
    """

    make: MakeOrder
    host_blocks: bool = False
    runs_on: bool = False
    sequential: bool = False
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
