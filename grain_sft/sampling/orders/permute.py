"""Permutations by numpy's generators. Run as a program, this module writes one permutation to a file.

The module imports little besides numpy, so that the program starts soon.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.storage import artifact
from grain_sft.types import Array


def row_dtype(num_rows: int) -> np.dtype[Any]:
    """Return uint32, as in OLMo-core, if it can represent every row number; else uint64."""
    return np.dtype(np.uint32 if num_rows <= 1 << 32 else np.uint64)


def permutation(num_rows: int, generator: str, seed: int) -> Array:
    """Return `permutation(num_rows)` of a numpy generator, but as uint32 or uint64 [num_rows].

    `generator` is "RandomState", or a bit generator of `numpy.random` such as "PCG64".
    """
    # a shuffle of uint32 numbers gives the same order as one of int64 numbers, which `permutation(num_rows)` makes
    rows = np.arange(num_rows, dtype=row_dtype(num_rows))
    if generator == "RandomState":
        np.random.RandomState(seed).shuffle(rows)
    else:
        np.random.Generator(getattr(np.random, generator)(seed)).shuffle(rows)
    return rows


if __name__ == "__main__":  # arguments: path of the file, generator, seed, and `load_permutation`'s `key` as JSON
    target, generator, seed, depends = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
    try:
        artifact.save(Path(target), depends, {"rows": permutation(depends["rows"], generator, seed)})
    except (OSError, MemoryError) as problem:
        sys.exit(f"{type(problem).__name__}: {problem}")
