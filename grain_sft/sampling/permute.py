"""The permutations of other systems, bit for bit; also run as a program that writes one to a file.

Imports numpy alone: the process that makes a permutation of a billion rows should cost what the permutation costs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt


def row_dtype(num_rows: int) -> np.dtype[Any]:
    """uint32 where it holds every row number, as in OLMo-core; else uint64."""
    return np.dtype(np.uint32 if num_rows <= 1 << 32 else np.uint64)


def olmo(num_rows: int, seed: int, epoch: int) -> npt.NDArray[Any]:
    """OLMo-core's `NumpyFSLDataLoader` (src/olmo_core/data/data_loader.py), whose epochs count from 1: ours plus 1."""
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    np.random.Generator(np.random.PCG64(seed + epoch + 1)).shuffle(rows)
    return rows


def maxtext(num_rows: int, seed: int, epoch: int) -> npt.NDArray[Any]:
    """MaxText's `OlmoIndexSampler.shuffled_global_indices` (olmo_data_grain.py, 0.2.5), epochs from 0.

    `Generator.permutation(n)` is `shuffle(arange(n))`: the swaps don't depend on the width of what is swapped.
    """
    digest = hashlib.sha256(f"olmo-shuffle:{seed}:{epoch}".encode()).digest()
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    np.random.default_rng(int.from_bytes(digest[:8], "little")).shuffle(rows)
    return rows


def episode(num_rows: int, seed: int, epoch: int) -> npt.NDArray[Any]:
    """The episode-indexed loader's: `RandomState(seed + epoch).permutation(n)`, epochs from 0."""
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    np.random.RandomState(seed + epoch).shuffle(rows)
    return rows


def openchat(num_rows: int, seed: int, epoch: int) -> npt.NDArray[Any]:
    """OpenChat's `MultipackDistributedSampler` (ochat/training_deepspeed/multipack_sampler.py), before it makes batches:
    `default_rng(seed + epoch).permutation(n)`, epochs from 0."""
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    np.random.default_rng(seed + epoch).shuffle(rows)
    return rows


PERMUTATIONS = {"olmo": olmo, "maxtext": maxtext, "episode": episode, "openchat": openchat}


def main(kind: str, num_rows: str, seed: str, epoch: str, temporary: str, target: str) -> None:
    """Write a permutation as a .npy file: to `temporary`, synced, then renamed to `target`."""
    rows = PERMUTATIONS[kind](int(num_rows), int(seed), int(epoch))
    with open(temporary, "wb") as file:
        np.save(file, rows, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, MemoryError) as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
