"""Permutations by numpy's generators; also run as a program that writes one to a file.

Imports numpy alone: the process that makes a permutation of a billion rows should cost what the permutation costs.
"""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 22  # bytes hashed together, as in storage/hashing.py


def row_dtype(num_rows: int) -> np.dtype[Any]:
    """Return uint32 where it holds every row number, as in OLMo-core; else uint64."""
    return np.dtype(np.uint32 if num_rows <= 1 << 32 else np.uint64)


def permutation(num_rows: int, generator: str, seed: int) -> npt.NDArray[Any]:
    """Return `generator.permutation(num_rows)`, uint32 or uint64 [num_rows].

    Args:
      num_rows: Number of rows.
      generator: "RandomState", or a bit generator of `numpy.random` such as "PCG64" (that of `default_rng`).
      seed: Seed of the generator.
    """
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    if generator == "RandomState":
        np.random.RandomState(seed).shuffle(rows)
    else:
        np.random.Generator(getattr(np.random, generator)(seed)).shuffle(rows)  # the swaps don't depend on the dtype
    return rows


def main(num_rows: str, generator: str, seed: str, temporary: str, target: str) -> None:
    """Write a permutation as a file of arrays: to `temporary`, synced, then renamed to `target`.

    Standard input has two lines, the frame of such a file in hexadecimal digits: its header with zeros for the checksum, and
    the bytes that are hashed before the blocks. storage/hashing.py and storage/artifact.py define the checksum; neither is
    imported, because they import more than numpy.
    """
    header, start = (bytes.fromhex(line) for line in sys.stdin.read().split())
    data = permutation(int(num_rows), generator, int(seed)).view(np.uint8).data
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
