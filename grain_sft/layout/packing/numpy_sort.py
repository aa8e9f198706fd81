"""NumPy's default argsort as another CPU computes it.

The sort has one implementation for CPUs with AVX-512, one for CPUs with AVX2, and one for all others. The three differ in the
order of equal values. To sort like a CPU without AVX-512, for example, this module starts a process in which numpy may not use
AVX-512.
"""

import subprocess
import sys
from collections.abc import Collection, Sequence

import numpy as np
from numpy._core import _multiarray_umath as _umath  # type: ignore[attr-defined]

from grain_sft.child_environment import child_environment
from grain_sft.errors import LayoutError
from grain_sft.types import Ints

SORTS = ("avx512", "avx2", "baseline")
"""Implementations of the sort. A CPU that can run an implementation can also run all later ones."""

_NAMES = {"avx512": "AVX-512", "avx2": "AVX2"}
_dispatched = _umath.__cpu_dispatch__  # CPU features that this build of numpy uses only if the CPU has them
_features = [name for name, has in _umath.__cpu_features__.items() if has]  # CPU features that numpy uses in this process

_PROGRAM = """
import sys
import numpy as np
from numpy._core._multiarray_umath import __cpu_features__ as features
print(np.__version__, *(name for name, has in features.items() if has), flush=True)
received = np.frombuffer(sys.stdin.buffer.read(), np.int64)
begins = received[1 : 1 + received[0]]
for values in np.split(received, begins)[1:]:
    sys.stdout.buffer.write(np.argsort(values).astype(np.int64).tobytes())
"""
"""Program that sorts arrays. Its input is int64 values: the number of arrays, the index in the input at which each array
begins, and the arrays. Its output is a line with numpy's version and CPU features, then the argsort of each array as bytes.
It imports only numpy, and so starts in 0.1 s."""


def numpy_sort(features: Collection[str] = _features) -> str:
    """Return which of `SORTS` numpy runs with these CPU features, by default those of this process."""
    # Before version 2.4, numpy names AVX512_SKX and AVX2 instead of X86_V4 and X86_V3.
    wide, narrow = ("X86_V4", "X86_V3") if "X86_V3" in _umath.__cpu_features__ else ("AVX512_SKX", "AVX2")
    if wide in features:
        return "avx512"
    return "avx2" if narrow in features else "baseline"


def sort_of(ties: str) -> str | None:
    """Return the sort that `ties` names: "avx2" for "numpy:avx2", this process's sort for "numpy", None for "stable"."""
    return None if ties == "stable" else ties.partition(":")[2] or numpy_sort()


def disabled_for(sort: str) -> str:
    """Return the value of NPY_DISABLE_CPU_FEATURES with which numpy uses `sort` on a CPU with more features."""
    wide = [name for name in _dispatched if name == "X86_V4" or name.startswith("AVX512")]
    narrow = [name for name in _dispatched if name in ("X86_V3", "AVX2")]
    return " ".join({"avx512": [], "avx2": wide, "baseline": wide + narrow}[sort])


def argsorts(ties: str, arrays: Sequence[Ints]) -> Sequence[Ints | None]:
    """Return the argsort of each array as on the CPU that `ties` names.

    The result is None for each array if `ties` is "stable", or if this process sorts as that CPU does.

    Raises:
      LayoutError: This CPU or this build of numpy does not have the sort, or the process that sorts fails.
    """
    sort = sort_of(ties)
    if sort is None or sort == numpy_sort():
        return [None] * len(arrays)
    ends = np.cumsum([len(array) for array in arrays])
    begins = 1 + len(arrays) + np.append(0, ends[:-1])
    environment = child_environment() | {"NPY_DISABLE_CPU_FEATURES": disabled_for(sort)}
    environment.pop("NPY_ENABLE_CPU_FEATURES", None)
    command = [sys.executable, "-P", "-W", "ignore", "-c", _PROGRAM]
    values = np.concatenate([[len(arrays)], begins, *arrays]).tobytes()
    try:
        done = subprocess.run(command, env=environment, input=values, capture_output=True)
    except OSError as error:
        problem = f"no process could be started to sort ({error})"
        raise LayoutError(f"ties='numpy:{sort}': {problem}. Free memory, or end other processes.") from error
    greeting, _, answer = done.stdout.partition(b"\n")
    if greeting:
        _check_process(greeting.decode(), sort)
    if len(answer) != 8 * ends[-1]:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        problem = f"the process that sorts ended with status {done.returncode} ({lines[-1]})"
        fix = f"Free memory, or copy the plan from a machine whose own sort is numpy:{sort}"
        raise LayoutError(f"ties='numpy:{sort}': {problem}. {fix}.")
    return np.split(np.frombuffer(answer, np.int64), ends[:-1])


def _check_process(greeting: str, sort: str) -> None:
    """Raise a LayoutError if the process that sorts has another numpy, or another sort.

    `greeting` is the first line of its output, such as "2.3.1 SSE AVX2".
    """
    version, *features = greeting.split()
    if version != np.__version__:
        problem = f"{sys.executable} started with numpy {version}; expected {np.__version__}, as here"
        raise LayoutError(f"ties='numpy:{sort}': {problem}. Remove the other numpy from its path.")
    found = numpy_sort(features)
    if SORTS.index(found) > SORTS.index(sort):
        problem = f"this CPU has no {_NAMES[sort]}; its best is numpy:{found}"
        fix = f"Copy the plan from a machine with {_NAMES[sort]}, or use OLMo-core's with PackedLayout.from_olmo_core."
        raise LayoutError(f"ties='numpy:{sort}': {problem}. {fix}")
    if found != sort:
        problem = f"this numpy {np.__version__} was compiled for CPUs with {_NAMES[found]}, and can't disable it"
        raise LayoutError(f"ties='numpy:{sort}': {problem}. Install a numpy from PyPI.")
