"""Exact permutations of up to billions of rows, made once per machine and shared by all its processes.

Below `IN_MEMORY_ROWS` a permutation is made where it is needed. Above, it is a file of the cache folder (see `artefact`),
made in a process of its own (so that no training process ever holds it), under a lock, and memory-mapped by whoever needs it.
The file says which permutation it is, and has a hash of this and of its rows, which is compared whenever a process opens it:
3.5 s of processor time for 724,000,000 rows, divided among up to 8 cores. Making them takes a minute.
"""

from __future__ import annotations

import contextlib
import glob
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from absl import logging

from grain_sft.errors import StorageError
from grain_sft.sampling import permute
from grain_sft.storage import artifact as artefact
from grain_sft.storage import files

_VERSION = 1

IN_MEMORY_ROWS = 1 << 21
"""Permutations of fewer rows take tens of milliseconds and are kept in memory."""


def load_permutation(
    kind: str, num_rows: int, seed: int, epoch: int, folder: str | os.PathLike[str] | None = None
) -> npt.NDArray[Any]:
    """The permutation of `num_rows` rows by generator `kind` (of `permute.PERMUTATIONS`) for an epoch counted from 0.

    Returns:
      uint32 [num_rows] (uint64 from 2^32 rows on), in memory or mapped from `folder`, by default the cache folder.

    Raises:
      StorageError: the file can't be made: no space, a folder that can't be written to, or one in a bucket.
    """
    if folder is not None:
        folder = files.normalize(folder)
        if files.is_remote(folder):
            raise StorageError(f"cache_dir={folder!r}: orders are mapped; expected a folder on a local disk.")
    if num_rows < IN_MEMORY_ROWS:
        return permute.PERMUTATIONS[kind](num_rows, seed, epoch)
    depends = {"orders": _VERSION, "order": kind, "rows": num_rows, "seed": seed, "epoch": epoch}
    name = f"{kind}-{num_rows}-{seed}-{epoch}{artefact.SUFFIX}"
    target = Path(folder or files.cache_dir() / "orders") / name
    found = _open(target, depends, num_rows)
    if found is not None:
        return found
    with files.locked(target):
        found = _open(target, depends, num_rows)  # another process may have made it meanwhile
        if found is not None:
            return found
        _build(kind, num_rows, seed, epoch, target, depends)
        found = _open(target, depends, num_rows)
    if found is None:
        raise StorageError(f"{target}: was written and can't be opened. Is another program clearing the folder?")
    return found


def release(rows: npt.NDArray[Any]) -> None:
    """Let go of the pages of a mapped permutation that were read. They stay in the page cache, for all processes.

    Otherwise an epoch would leave all of it resident: the kernel maps 64 KiB or more around each place that is read.
    """
    if isinstance(rows, np.memmap):
        rows._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]


def _open(target: Path, depends: Mapping[str, Any], num_rows: int) -> npt.NDArray[Any] | None:
    """The mapped permutation; None where there is none, a damaged one, or another."""

    def check(arrays: artefact.Arrays) -> None:
        rows = arrays.get("rows")
        if rows is None or rows.shape != (num_rows,) or rows.dtype != permute.row_dtype(num_rows):
            raise ValueError(f"it does not hold {num_rows} rows")

    found = artefact.open_cached(target, depends, check)
    return None if found is None else found["rows"]


def _build(kind: str, num_rows: int, seed: int, epoch: int, target: Path, depends: Mapping[str, Any]) -> None:
    host = f"{target.name}.{socket.gethostname()}"
    for stale in target.parent.glob(f"{glob.escape(host)}.*.tmp"):  # of a builder that was killed; we hold the lock
        with contextlib.suppress(OSError):
            stale.unlink()
    needed = num_rows * permute.row_dtype(num_rows).itemsize
    free = os.statvfs(target.parent).f_bavail * os.statvfs(target.parent).f_frsize
    if free < needed:
        raise StorageError(
            f"{target.parent}: the order of {num_rows} rows needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free. "
            f"Make room, or point ${files.CACHE_DIR_VARIABLE} to another disk."
        )
    logging.info("Making the order of %d rows for seed %d, epoch %d: %s", num_rows, seed, epoch, target)
    temporary = target.with_name(f"{host}.{os.getpid()}.tmp")
    arguments = [kind, str(num_rows), str(seed), str(epoch), str(temporary), str(target)]
    command = [sys.executable, "-P", permute.__file__, *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    frame = artefact.frame(depends, {"rows": (permute.row_dtype(num_rows), (num_rows,))})
    lines = f"{frame.header.hex()}\n{frame.start.hex()}\n"
    try:
        result = subprocess.run(command, env=environment, input=lines, capture_output=True, text=True)
    except OSError as error:
        raise StorageError(f"{target}: no process could be started to make it ({error}).") from error
    finally:
        temporary.unlink(missing_ok=True)
    if result.returncode:
        reason = result.stderr.strip().splitlines()[-1:] or [f"exit status {result.returncode}"]
        raise StorageError(
            f"{target}: the order of {num_rows} rows could not be made: {reason[0]}. "
            f"It takes {needed / 1e9:.2f} GB of memory and of disk; ${files.CACHE_DIR_VARIABLE} names the folder."
        )
