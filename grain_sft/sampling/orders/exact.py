"""Orders of rows that equal those of other systems, such as OLMo-core and MaxText.

An epoch is a permutation of all rows by one of numpy's generators. A long permutation is stored in a file, which all processes
of a machine map into memory.
"""

import functools
import hashlib
import json
import mmap
import operator
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from grain_sft.child_environment import child_environment
from grain_sft.errors import SamplerError, StorageError
from grain_sft.sampling.orders import permute
from grain_sft.sampling.orders.order import CacheDir, Order, RowsAt, kept_by_epoch
from grain_sft.storage import artifact, files
from grain_sft.types import Array, Ints, UnsignedInts

_VERSION = 1  # version of the file format
_SEEDS = 1 << 32  # RandomState takes seeds below this

IN_MEMORY_ROWS = 1 << 21
"""A permutation of this many rows or more is stored in a file. Each process makes shorter permutations itself, in tens of
milliseconds."""


def stored_order(name: str, generator: str, seed_of: Callable[[int, int], int]) -> Callable[..., RowsAt]:
    """Return `Order.make` for an order that permutes each epoch with a generator of numpy.

    Args:
      name: Name of the order, which is part of the names of its files.
      generator: Name of the generator, as in `permute.permutation`.
      seed_of: Function of the run's seed and an epoch that returns the generator's seed.
    """

    def make(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
        """Return the `RowsAt` of `num_rows` rows. It makes or opens the permutation of an epoch on first use."""
        seed_of(seed, 0)  # an invalid seed raises an error here, and not in the first batch

        @kept_by_epoch
        def permutation(epoch: int) -> UnsignedInts:
            key = {"orders": _VERSION, "order": name, "rows": num_rows, "seed": seed, "epoch": epoch}
            return load_permutation(key, (generator, seed_of(seed, epoch)), cache_dir)

        def rows_at(epoch: int, indices: Ints) -> Ints:
            rows = permutation(epoch)
            found = rows[indices].astype(np.int64)
            if isinstance(rows, np.memmap):
                # For each index, the kernel maps 64 KiB or more. Without this call, memory would fill up with the whole file.
                rows.base.madvise(mmap.MADV_DONTNEED)  # type: ignore[union-attr]
            return found

        return rows_at

    return make


def load_permutation(key: Mapping[str, Any], generator: tuple[str, int], cache_dir: CacheDir) -> Array:
    """Return a permutation: uint32 [rows] (uint64 above 2^32 rows), in memory or mapped from a file in the cache folder.

    A child process makes the file, so that no training process needs the memory. A lock admits one such process at a time. To
    make a file of 724,000,000 rows takes a minute. Each process that opens such a file checks the hash of the file, in 3.5 s of
    processor time.

    Args:
      key: Values that the permutation depends on, such as {"orders": 1, "order": "olmo", "rows": 4000000, "seed": 3,
        "epoch": 0}. "orders" is the version of the file format. A file with other values in the header is made again.
      generator: Name and seed of the generator, as in `permute.permutation`.
      cache_dir: Folder of the files; None means the folder "orders" of the user's cache.
    """
    num_rows: int = key["rows"]
    if cache_dir is not None:
        cache_dir = files.normalize(cache_dir)
        if files.is_remote(cache_dir):
            raise StorageError(f"cache_dir={cache_dir!r}: expected a local folder, because orders are memory-mapped.")
    if num_rows < IN_MEMORY_ROWS:
        return permute.permutation(num_rows, *generator)
    name = "-".join(str(key[field]) for field in ("order", "rows", "seed", "epoch")) + artifact.SUFFIX
    target = Path(cache_dir or files.cache_dir() / "orders") / name

    def check(arrays: artifact.Arrays) -> None:
        rows = arrays.get("rows")
        if rows is None or rows.shape != (num_rows,) or rows.dtype != permute.row_dtype(num_rows):
            raise ValueError(f"it does not hold {num_rows} rows")

    return artifact.open_or_write(target, key, functools.partial(_write, target, key, generator), check)["rows"]


def _write(target: Path, key: Mapping[str, Any], generator: tuple[str, int]) -> None:
    """Run `permute.py` in a child process, which writes the permutation to the file `target`."""
    num_rows: int = key["rows"]
    logging.info("Making the order of %d rows: %s", num_rows, target)
    command = [sys.executable, "-P", permute.__file__, str(target), *map(str, generator), json.dumps(key)]
    try:
        result = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    except OSError as error:
        problem = f"no process could be started to make it ({error})"
        raise StorageError(f"{target}: {problem}. Free memory, or end other processes.") from error
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        size = num_rows * permute.row_dtype(num_rows).itemsize / 1e9
        needed = f"It takes {size:.2f} GB of memory and disk. Give another folder as cache_dir or ${files.CACHE_DIR_VARIABLE}."
        raise StorageError(f"{target}: the order of {num_rows} rows could not be made: {reason[0]}. {needed}")


def _olmo_seed(seed: int, epoch: int) -> int:
    return seed + epoch + 1  # OLMo-core's epochs count from 1


def _episode_seed(seed: int, epoch: int) -> int:
    if seed + epoch >= _SEEDS:
        expected = f"order 'episode' seeds numpy's RandomState with seed + epoch, which may be 0 to {_SEEDS - 1}"
        raise SamplerError(f"seed={seed}, epoch {epoch}: {expected}. Take a smaller seed.")
    return seed + epoch


def _maxtext_seed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"olmo-shuffle:{seed}:{epoch}".encode()).digest()[:8], "little")


OLMO = Order(stored_order("olmo", "PCG64", _olmo_seed), epoch_seed=_olmo_seed)
"""Order of OLMo-core's `NumpyFSLDataLoader` (src/olmo_core/data/data_loader.py)."""

MAXTEXT = Order(stored_order("maxtext", "PCG64", _maxtext_seed), host_blocks=True, runs_on=True)
"""Order of MaxText's `OlmoIndexSampler` (olmo_data_grain.py, 0.2.5)."""

EPISODE = Order(stored_order("episode", "RandomState", _episode_seed), epoch_seed=_episode_seed)
"""Order of the episode-indexed loader that docs/coming_from.md describes: `RandomState(seed + epoch).permutation(n)`."""

OPENCHAT = Order(stored_order("openchat", "PCG64", operator.add), epoch_seed=operator.add)
"""Order of documents in OpenChat (ochat/training_deepspeed/multipack_sampler.py), before OpenChat makes batches of them."""
