"""NumPy's default argsort as on a lesser CPU, whose order of equal values differs, in a process with CPU features disabled."""

import contextlib
import subprocess
import sys
from collections.abc import Collection, Iterator

import numpy as np
from numpy._core import _multiarray_umath as _umath  # type: ignore[attr-defined]

from grain_sft.child_environment import child_environment
from grain_sft.errors import LayoutError
from grain_sft.layout.packing.algorithm import Argsort, Ints

SORTS = ("avx512", "avx2", "baseline")
"""Best first. "baseline" needs neither AVX-512 nor AVX2; every CPU has it."""

_NAMES = {"avx512": "AVX-512", "avx2": "AVX2"}
_dispatched = _umath.__cpu_dispatch__
_features = [name for name, has in _umath.__cpu_features__.items() if has]

_PROGRAM = """
import sys
import numpy as np
from numpy._core._multiarray_umath import __cpu_features__ as features
read, write = sys.stdin.buffer, sys.stdout.buffer
write.write(" ".join([np.__version__, *(name for name, has in features.items() if has)]).encode() + b"\\n")
write.flush()
while len(count := read.read(8)) == 8:
    values = np.frombuffer(read.read(8 * int.from_bytes(count, sys.byteorder)), np.int64)
    write.write(np.argsort(values).astype(np.int64).tobytes())
    write.flush()
"""
"""Program that writes numpy's version and the CPU features that numpy uses. It then reads requests, each a number of values
and the values, and answers each with the argsort, all as int64. It imports numpy alone, to start in a tenth of a second."""


def numpy_sort(features: Collection[str] = _features) -> str:
    """Return which of `SORTS` numpy runs with these CPU features, by default those of this process."""
    wide, narrow = ("X86_V4", "X86_V3") if "X86_V3" in _umath.__cpu_features__ else ("AVX512_SKX", "AVX2")  # before 2.4
    if wide in features:
        return "avx512"
    return "avx2" if narrow in features else "baseline"


def sort_of(ties: str) -> str | None:
    """Return which of `SORTS` the option `ties` asks for; None for "stable", under which all give the same order."""
    if ties == "stable":
        return None
    return ties.partition(":")[2] or numpy_sort()


def disabled_for(sort: str) -> str:
    """Return the value of NPY_DISABLE_CPU_FEATURES with which this numpy runs `sort`, if numpy and the CPU can."""
    wide = [name for name in _dispatched if name == "X86_V4" or name.startswith("AVX512")]
    narrow = [name for name in _dispatched if name in ("X86_V3", "AVX2")]
    return " ".join({"avx512": [], "avx2": wide, "baseline": wide + narrow}[sort])


@contextlib.contextmanager
def argsort_of(ties: str) -> Iterator[Argsort | None]:
    """Yield the argsort that `ties` asks for; None if it is that of numpy in this process.

    The process that sorts starts with the first call and ends with the context. A call raises a LayoutError if this CPU or
    this build of numpy does not have the sort, or if the process does not start.
    """
    sort = sort_of(ties)
    if sort is None or sort == numpy_sort():
        yield None
        return
    children: list[subprocess.Popen[bytes]] = []

    def argsort(values: Ints) -> Ints:
        if not children:
            children.append(_start(sort))
            _check_greeting(children[0], sort)
        child = children[0]
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the answer is then too short
            child.stdin.write(len(values).to_bytes(8, sys.byteorder) + np.ascontiguousarray(values, np.int64).tobytes())
            child.stdin.flush()
        answer = child.stdout.read(8 * len(values))
        if len(answer) != 8 * len(values):
            raise _ended(child, sort)
        return np.frombuffer(answer, np.int64)

    try:
        yield argsort
    finally:
        for child in children:
            with contextlib.suppress(OSError), child:
                pass  # leaving closes its pipes, which ends it, and waits for it


def _start(sort: str) -> subprocess.Popen[bytes]:
    environment = child_environment() | {"NPY_DISABLE_CPU_FEATURES": disabled_for(sort)}
    environment.pop("NPY_ENABLE_CPU_FEATURES", None)
    command, pipe = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM], subprocess.PIPE
    try:
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise LayoutError(f"ties='numpy:{sort}': no process could be started to sort ({error}).") from error


def _check_greeting(child: subprocess.Popen[bytes], sort: str) -> None:
    """Raise a LayoutError unless a process has this version of numpy, and the sort that it was started for."""
    assert child.stdout is not None
    version, *features = child.stdout.readline().decode().split() or [""]
    if not version:
        raise _ended(child, sort)
    if version != np.__version__:
        raise LayoutError(
            f"ties='numpy:{sort}': {sys.executable} started with numpy {version}; expected {np.__version__}, as here. "
            "Remove the other numpy from its path."
        )
    found = numpy_sort(features)
    if SORTS.index(found) > SORTS.index(sort):
        raise LayoutError(
            f"ties='numpy:{sort}': this CPU has no {_NAMES[sort]}; its best is numpy:{found}. Make the plan on a machine with "
            f"{_NAMES[sort]} and copy it, or read OLMo-core's with PackedLayout.from_olmo_core."
        )
    if found != sort:
        raise LayoutError(
            f"ties='numpy:{sort}': this numpy {np.__version__} was compiled for CPUs with {_NAMES[found]}, and can't "
            "disable it. Install a numpy from PyPI."
        )


def _ended(child: subprocess.Popen[bytes], sort: str) -> LayoutError:
    assert child.stderr is not None
    lines = child.stderr.read().decode(errors="replace").strip().splitlines() or ["no message"]
    return LayoutError(f"ties='numpy:{sort}': the process that sorts ended with status {child.wait()} ({lines[-1]}).")
