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

_BLOCK = 1 << 22  # bytes that are hashed together, as in hashing.py


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
    """Write a permutation as a file of arrays: to `temporary`, synced, then renamed to `target`.

    Standard input has two lines, the frame of such a file in hexadecimal digits: its header with zeros for the checksum, and
    the bytes that are hashed before the blocks. `hashing.py` and `artefact.py` say what the checksum is of; neither is
    imported, since with them comes more than numpy.
    """
    header, start = (bytes.fromhex(line) for line in sys.stdin.read().split())
    rows = PERMUTATIONS[kind](int(num_rows), int(seed), int(epoch))
    data = rows.view(np.uint8).data
    blocks = (hashlib.sha256(data[at : at + _BLOCK]).digest() for at in range(0, len(data), _BLOCK))
    checksum = hashlib.sha256(start + b"".join(blocks)).hexdigest()
    with open(temporary, "wb") as file:
        file.write(header.replace(b"0" * 64, checksum.encode(), 1))
        file.write(data)
        file.write(b"\0" * (-len(data) % 64))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except (OSError, MemoryError) as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
