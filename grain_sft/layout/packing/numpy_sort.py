"""How numpy's default argsort orders equal values: by which of its sorts runs. Also run as a program that sorts for another
process, whose numpy has other sorts; imports numpy alone, so that it starts in a tenth of a second."""

from __future__ import annotations

import sys
from typing import BinaryIO

import numpy as np
from numpy._core import _multiarray_umath as _umath  # type: ignore[attr-defined]

SORTS = ("avx512", "avx2", "baseline")
"""Best first. "baseline" needs neither AVX-512 nor AVX2; every CPU has it."""

_features, _dispatched = _umath.__cpu_features__, _umath.__cpu_dispatch__


def numpy_sort() -> str:
    """Return which of `SORTS` runs here. Numpy leaves out what NPY_DISABLE_CPU_FEATURES names when it is imported."""
    wide, narrow = ("X86_V4", "X86_V3") if "X86_V3" in _features else ("AVX512_SKX", "AVX2")  # before numpy 2.4
    if _features.get(wide):
        return "avx512"
    return "avx2" if _features.get(narrow) else "baseline"


def disabled_for(sort: str) -> str:
    """Return what NPY_DISABLE_CPU_FEATURES must name for this numpy to sort like `sort`, at best: numpy can't leave out what
    it was compiled with, nor add what the CPU lacks."""
    wide = [name for name in _dispatched if name == "X86_V4" or name.startswith("AVX512")]
    narrow = [name for name in _dispatched if name in ("X86_V3", "AVX2")]
    return " ".join({"avx512": [], "avx2": wide, "baseline": wide + narrow}[sort])


def serve(read: BinaryIO, write: BinaryIO) -> None:
    """Write which numpy and which sort this is; then answer each request until there is no more.

    A request is the number of values and the values, an answer the argsort of them, all int64 of this machine.
    """
    write.write(f"{np.__version__} {numpy_sort()}\n".encode())
    write.flush()
    while len(count := read.read(8)) == 8:
        values = np.frombuffer(read.read(8 * int.from_bytes(count, sys.byteorder)), np.int64)
        write.write(np.argsort(values).astype(np.int64).tobytes())
        write.flush()


if __name__ == "__main__":
    serve(sys.stdin.buffer, sys.stdout.buffer)
