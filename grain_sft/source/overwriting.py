"""Writing to many spans of a batch's arrays. The interpreter copies prepared memory to a span in 0.1 us, numpy takes 0.3."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.layout import ragged
from grain_sft.source.arrays import Arrays, Int32s, Stack

Ints = npt.NDArray[np.int64]

_CHUNK = 4  # tokens, as one complex128: numpy copies 16 bytes at an index as fast as 4
_MOST_KEPT = 1 << 14  # lengths of runs


class Runs(dict[int, memoryview]):
    """Runs of equal values: `runs[n]` is the memory of n of them, int32 or what `dtype` is.

    Args:
      dtype: Dtype of the values.
      value: The value.
    """

    def __init__(self, dtype: np.dtype[Any], value: int) -> None:
        self._value, self._values = value, np.full(0, value, dtype)

    def __missing__(self, count: int) -> memoryview:
        if count > len(self._values):
            self._values = np.full(1 << count.bit_length(), self._value, self._values.dtype)
        if len(self) >= _MOST_KEPT:
            self.clear()
        run = self[count] = self._values[:count].data
        return run


runs_of = functools.cache(Runs)


def overwrite(start: Ints, count: Ints, *values: tuple[npt.NDArray[Any], Runs]) -> None:
    """Write runs to spans of each flattened array of `values`: `count` values from `start`, int64 [n] each."""
    written = [(array.reshape(-1).data, runs) for array, runs in values]
    for first, length in zip(start.tolist(), count.tolist()):  # noqa: B905
        where = slice(first, first + length)
        for flat, runs in written:
            flat[where] = runs[length]


class Copies:
    """Writable copies of arrays that batches share. Memory of a copy that is gone is used again: only the spans that were
    written to are restored, which takes a tenth of the time of a copy."""

    def __init__(self) -> None:
        self._arrays = Arrays()
        self._originals: dict[tuple[int, Any], tuple[tuple[Int32s, ...], _Chunks]] = {}

    def of(self, shared: tuple[Int32s, ...], start: Ints, stop: Ints) -> list[Int32s]:
        """Return copies of `shared`, int32 arrays of one shape. The caller may write to the spans of their flattened values
        from `start` to `stop`, int64 [n] each, and to nothing else."""
        count, shape = key = len(shared), shared[0].shape
        kept, original = self._originals.get(key, ((), None))
        if original is None or any(one is not other for one, other in zip(kept, shared, strict=True)):
            original, arrays = Arrays().stack(count, shape, _Chunks)
            for array, values in zip(arrays, shared, strict=True):
                array[...] = values
            self._originals[key] = shared, original
        chunks, arrays = self._arrays.stack(count, shape, _Chunks)
        chunks.restore(original)
        chunks.changes(start, stop)
        return arrays


class _Chunks:
    """The memory of a `Stack` in chunks, and those in which its arrays differ from the original."""

    def __init__(self, stack: Stack) -> None:
        self._count, apart = len(stack.arrays), stack.arrays.strides[0] // 16
        self._chunks = np.ndarray(self._count * apart, np.complex128, stack.memory, stack.begin)
        self._begins = apart * np.arange(self._count)[:, np.newaxis]
        self._original: _Chunks | None = None
        self._changed: Ints = np.zeros(0, np.int64)

    def restore(self, original: _Chunks) -> None:
        """Make the chunks equal to those of `original`."""
        if self._original is original:
            self._chunks[self._changed] = original._chunks[self._changed]
        else:
            self._chunks[...] = original._chunks
            self._original = original

    def changes(self, start: Ints, stop: Ints) -> None:
        """Record spans that are written to; where they are long, the next `restore` copies everything."""
        first = start // _CHUNK
        counts = (stop + _CHUNK - 1) // _CHUNK - first
        if counts.sum() * self._count > len(self._chunks) // 8:
            self._original = None
            return
        of, number = ragged(counts)
        self._changed = (first[of] + number + self._begins).reshape(-1)
