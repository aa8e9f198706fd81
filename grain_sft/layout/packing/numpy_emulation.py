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
    """Which of numpy's sorts `ties` asks for; None with "stable", which is the same under all."""
    if ties == "stable":
        return None
    return ties.partition(":")[2] or numpy_sort.numpy_sort()


@contextlib.contextmanager
def argsort_of(ties: str) -> Iterator[Argsort | None]:
    """The argsort that `ties` asks for, where numpy here has another; None where numpy's own will do.

    The process that sorts is started when it is first asked, and serves until the context ends.
    """
    sort = sort_of(ties)
    if sort is None or sort == numpy_sort.numpy_sort():
        yield None
        return
    other = _OtherNumpy(sort)
    try:
        yield other
    finally:
        other.close()


class _OtherNumpy:
    """Argsort by a child process: the same numpy, with features of the CPU switched off."""

    def __init__(self, sort: str) -> None:
        self._sort = sort
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, values: Ints) -> Ints:
        """As `numpy.argsort(values)`, there.

        Raises:
          LayoutError: this CPU, or this build of numpy, can't sort so; or no process could be started.
        """
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(len(values).to_bytes(8, sys.byteorder))
            child.stdin.write(np.ascontiguousarray(values, np.int64).data)
            child.stdin.flush()
        except BrokenPipeError as error:
            raise self._ended() from error
        answer = child.stdout.read(8 * len(values))
        if len(answer) != 8 * len(values):
            raise self._ended()
        return np.frombuffer(answer, np.int64)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            for pipe in (self._child.stdin, self._child.stdout, self._child.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
            self._child.wait()
            self._child = None

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if name != "NPY_ENABLE_CPU_FEATURES"}
        environment["NPY_DISABLE_CPU_FEATURES"] = numpy_sort.disabled_for(self._sort)
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-P", "-W", "ignore", numpy_sort.__file__]
        try:
            self._child = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            raise LayoutError(f"ties='numpy:{self._sort}': no process could be started to sort ({error}).") from error
        assert self._child.stdout is not None
        version, _, sort = self._child.stdout.readline().decode().strip().partition(" ")
        if not sort:
            raise self._ended()
        if version != np.__version__:
            raise LayoutError(
                f"ties='numpy:{self._sort}': {sys.executable} started with numpy {version}; expected {np.__version__}, as "
                "here. Is another numpy before it on the path?"
            )
        if sort != self._sort:
            raise LayoutError(_unplayable(self._sort, sort))
        return self._child

    def _ended(self) -> LayoutError:
        assert self._child is not None and self._child.stderr is not None
        said = self._child.stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
        status = self._child.wait()
        return LayoutError(
            f"ties='numpy:{self._sort}': the process that sorts ended with status {status} ({said[-1]})."
        )


def _unplayable(wanted: str, found: str) -> str:
    """Why a process that should sort like `wanted` sorts like `found`."""
    if numpy_sort.SORTS.index(found) > numpy_sort.SORTS.index(wanted):
        return (
            f"ties='numpy:{wanted}': this CPU has no {_NAMES[wanted]}, so numpy {np.__version__} can't sort here as it does "
            f"with it; the best there is here is numpy:{found}. Make the plan on a machine with {_NAMES[wanted]} and copy it, "
            "or read OLMo-core's with PackedLayout.from_olmo_core."
        )
    return (
        f"ties='numpy:{wanted}': this numpy {np.__version__} was compiled for CPUs with {_NAMES[found]}, and can't leave that "
        "out. Install a numpy from PyPI."
    )
