"""The order that numpy's argsort gives to equal values on another CPU, from a process whose numpy may not use all that this
CPU has."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np

from grain_sft.errors import LayoutError
from grain_sft.layout.packing import numpy_sort
from grain_sft.layout.packing.algorithm import Argsort, Ints

_NAMES = {"avx512": "AVX-512", "avx2": "AVX2"}


def sort_of(ties: str) -> str | None:
    """Return which of numpy's sorts `ties` asks for; None with "stable", which is the same under all."""
    if ties == "stable":
        return None
    return ties.partition(":")[2] or numpy_sort.numpy_sort()


@contextlib.contextmanager
def argsort_of(ties: str) -> Iterator[Argsort | None]:
    """Enter with the argsort that `ties` asks for, where numpy here has another; with None where numpy's own will do.

    The process that sorts starts with the first call and serves until the context ends. A call raises LayoutError where
    this CPU, or this build of numpy, can't sort so, or no process can be started.
    """
    sort = sort_of(ties)
    if sort is None or sort == numpy_sort.numpy_sort():
        yield None
        return
    children: list[subprocess.Popen[bytes]] = []

    def argsort(values: Ints) -> Ints:
        if not children:
            children.append(_start(sort))
            _check_greeting(children[0], sort)
        return _sorted_by(children[0], sort, values)

    try:
        yield argsort
    finally:
        for child in children:
            with contextlib.suppress(OSError), child:
                pass  # leaving closes its pipes, which ends it, and waits for it


def _start(sort: str) -> subprocess.Popen[bytes]:
    environment = {name: value for name, value in os.environ.items() if name != "NPY_ENABLE_CPU_FEATURES"}
    environment["NPY_DISABLE_CPU_FEATURES"] = numpy_sort.disabled_for(sort)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-P", "-W", "ignore", numpy_sort.__file__]
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise LayoutError(f"ties='numpy:{sort}': no process could be started to sort ({error}).") from error


def _check_greeting(child: subprocess.Popen[bytes], sort: str) -> None:
    """Check that a process has this numpy, and the sort that it was started for."""
    assert child.stdout is not None
    version, _, found = child.stdout.readline().decode().strip().partition(" ")
    if not found:
        raise _ended(child, sort)
    if version != np.__version__:
        raise LayoutError(
            f"ties='numpy:{sort}': {sys.executable} started with numpy {version}; expected {np.__version__}, as here. Is "
            "another numpy before it on the path?"
        )
    if numpy_sort.SORTS.index(found) > numpy_sort.SORTS.index(sort):
        raise LayoutError(
            f"ties='numpy:{sort}': this CPU has no {_NAMES[sort]}, so numpy {np.__version__} can't sort here as it does with "
            f"it; the best of this CPU is numpy:{found}. Make the plan on a machine with {_NAMES[sort]} and copy it, or read "
            "OLMo-core's with PackedLayout.from_olmo_core."
        )
    if found != sort:
        raise LayoutError(
            f"ties='numpy:{sort}': this numpy {np.__version__} was compiled for CPUs with {_NAMES[found]}, and can't leave "
            "that out. Install a numpy from PyPI."
        )


def _sorted_by(child: subprocess.Popen[bytes], sort: str, values: Ints) -> Ints:
    """Return `numpy.argsort(values)` of the process."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(len(values).to_bytes(8, sys.byteorder))
        child.stdin.write(np.ascontiguousarray(values, np.int64).data)
        child.stdin.flush()
    except BrokenPipeError as error:
        raise _ended(child, sort) from error
    answer = child.stdout.read(8 * len(values))
    if len(answer) != 8 * len(values):
        raise _ended(child, sort)
    return np.frombuffer(answer, np.int64)


def _ended(child: subprocess.Popen[bytes], sort: str) -> LayoutError:
    assert child.stderr is not None
    lines = child.stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
    return LayoutError(f"ties='numpy:{sort}': the process that sorts ended with status {child.wait()} ({lines[-1]}).")
