"""`Order`: an entry of the table of orders."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.registry import entry_errors, is_ours, name_of
from grain_sft.storage import ForkSafeLock
from grain_sft.types import Array, Ints

T = TypeVar("T")

CacheDir = str | os.PathLike[str] | None
RowsAt = Callable[[int, Ints], Ints]
"""Function (epoch, indices) that returns the rows at `indices` of the epoch's order. Both arrays are int64 [n]. Epochs count
from 0."""

EPOCHS_KEPT = 2  # number of cached epochs: a batch may have rows of two epochs
_MOST_CHECKED = 1 << 18  # most rows of an epoch that is checked as a whole: a check computes every row of the epoch


def kept_by_epoch(make: Callable[[int], T]) -> Callable[[int], T]:
    """Return `make`, a function of an epoch, with a cache. Threads that request a new epoch wait for one call of `make`.

    Without the lock, each of 8 threads would make the epoch. 3 million rows of order "balanced" would take 12 s of processor
    time and 1.2 GB of memory, instead of 1.4 s and 0.15 GB.
    """
    cached, locked = functools.lru_cache(maxsize=EPOCHS_KEPT)(make), ForkSafeLock()

    def of_epoch(epoch: int) -> T:
        with locked.lock:
            made = cached(epoch)  # an exception right after this call still leaves the block; after a `return`, it may not
        return made

    return of_epoch


def cached_by_epoch(rows_of_epoch: Callable[[int], Ints]) -> RowsAt:
    """Return the `RowsAt` of a function that returns all rows of an epoch."""
    kept = kept_by_epoch(rows_of_epoch)
    return lambda epoch, indices: kept(epoch)[indices]


class Costs(NamedTuple):
    """What an order by cost needs: the cost of each row, and which indices a step reads.

    Attributes:
      rows: Function that returns the cost of each row, int64 [num_rows].
      cuts: Function of an epoch that returns int64 [steps + 1]: the first index of each step of the epoch, then the index after
        the last row that a step reads.
    """

    rows: Callable[[], Ints]
    cuts: Callable[[int], Ints]


@dataclasses.dataclass(frozen=True)
class Order:
    """Entry of the table of orders.

    Args:
      make: Function `make(num_rows, *, seed, cache_dir)` that returns the `RowsAt` of `num_rows` rows; with `by_cost`, it also
        takes `costs: Costs`. It raises a `SamplerError` for an invalid `num_rows` or seed. Every epoch has each row once,
        except in order `random`.
      host_blocks: Whether host h of H reads the h-th contiguous block of each epoch, so that batches depend on H.
      runs_on: Whether a batch may have rows of two epochs, whatever `last_batch` is.
      sequential: Whether rows are read in ascending order, without a seed.
      by_cost: Whether the order depends on the `Costs` of the rows. A mixture refuses such an order, because its sources share
        steps.
      epoch_seed: Function of the run's seed and an epoch that returns the seed of that epoch, for the audit log.
    """

    make: Callable[..., RowsAt]
    host_blocks: bool = False
    runs_on: bool = False
    sequential: bool = False
    by_cost: bool = False
    epoch_seed: Callable[[int, int], int] = lambda seed, epoch: seed

    @classmethod
    def from_permutation(cls, permutation: Callable[[int, int, int], Any], **traits: Any) -> Self:
        """Return the order of a function that permutes one epoch. The rows of `EPOCHS_KEPT` epochs stay in memory.

        Args:
          permutation: Function of (seed, epoch, num_rows) that returns every row once: integers [num_rows], the same on
            every machine.
          **traits: Other fields of `Order`, except `by_cost`.
        """

        def make(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
            """Return a `RowsAt` that calls `permutation` for each epoch that is not in its cache."""

            def rows_of(epoch: int) -> Ints:
                """Return the permutation of an epoch: int64 [num_rows]. Refuse a result that repeats or lacks rows."""
                expected = "Expected a function of (seed, epoch, num_rows). Fix its code, or name another."
                where = f"order {name_of(permutation)}, epoch {epoch}"
                with entry_errors(SamplerError, where, expected):
                    rows = np.asarray(permutation(seed, epoch, num_rows))
                    _check_permutation(rows, num_rows, where)
                return rows.astype(np.int64)

            return cached_by_epoch(rows_of)

        return cls(make, **traits)

    @classmethod
    def of(cls, entry: Self | Callable[[int, int, int], Any], name: str) -> Self:
        """Return the entry `name` of the table: `entry`, or `from_permutation(entry)` if it is not an `Order`.

        The rows of an `Order` of another package are checked. A row that does not exist, such as -1, is a `SamplerError`. An
        epoch of at most `_MOST_CHECKED` rows is computed as a whole, and kept in memory. It is a `SamplerError` if the epoch
        repeats or lacks rows.
        """
        if not isinstance(entry, cls):
            return cls.from_permutation(entry)  # type: ignore[arg-type]
        if is_ours(entry.make):  # built in, or made by `from_permutation`
            return entry

        def make(num_rows: int, **options: Any) -> RowsAt:
            """Return the `RowsAt` of `entry`, whose results are checked in each call."""
            expected = "Return the numbers of the rows at the indices."
            with entry_errors(SamplerError, f"order {name}", "Expected a function `make`, as in `Order`. Fix its code."):
                rows_at = entry.make(num_rows, **options)

            def checked(epoch: int, indices: Ints) -> Ints:
                """Return the rows at `indices`. Refuse results of another shape or type, and rows that do not exist."""
                where = f"order {name}, epoch {epoch}"
                with entry_errors(SamplerError, where, expected):
                    rows = np.asarray(rows_at(epoch, indices))
                problem = ""
                if rows.shape != indices.shape or rows.dtype.kind not in "iu":
                    problem = f"{rows.dtype} of shape {list(rows.shape)} for {len(indices)} indices"
                elif len(outside := np.flatnonzero((rows < 0) | (rows >= num_rows))):
                    problem = f"row {rows[outside[0]]} at index {indices[outside[0]]}; expected 0 to {num_rows - 1}"
                if problem:
                    raise SamplerError(f"{where}: {problem}. {expected}")
                return rows.astype(np.int64)  # in a narrow dtype, sums with row numbers would wrap around

            def whole(epoch: int) -> Ints:
                rows = checked(epoch, np.arange(num_rows))
                _check_permutation(rows, num_rows, f"order {name}, epoch {epoch}")
                return rows

            return cached_by_epoch(whole) if num_rows <= _MOST_CHECKED else checked

        return dataclasses.replace(entry, make=make)


def _check_permutation(rows: Array, num_rows: int, where: str) -> None:
    if rows.shape != (num_rows,) or not np.array_equal(np.sort(rows), np.arange(num_rows)):
        problem = f"found {rows.dtype} of shape {list(rows.shape)} that repeats or lacks rows"
        fix = f"Return a permutation of range({num_rows})."
        raise SamplerError(f"{where}: expected each of {num_rows} rows once; {problem}. {fix}")
