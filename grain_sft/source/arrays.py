"""Allocator of the arrays of batches. It reuses memory, and chooses addresses that make copies fast."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Pieces
from grain_sft.storage import ForkSafeLock
from grain_sft.types import Array

if TYPE_CHECKING:
    from jaxtyping import Int32

Element = dict[str, Array]
"""Output of sources and input of transforms: arrays [L] of a row or [rows, L] of a batch."""

Int32s = npt.NDArray[np.int32]

_PAGE = 4096
_KEPT = 1 << 28  # most bytes of memory that an `Arrays` keeps
_KEPT_OF_KEY = 256  # most buffers that it keeps for arrays of one shape: a search for an unused one takes up to 20 us


class ReadRows(NamedTuple):
    """Inputs and targets of rows, [rows, L], as the transform `ShiftTargets` makes them.

    Attributes:
      inputs: int32, tokens.
      targets: int32, the token after each token of `inputs`; 0 at the end of a row.
      positions, segment_ids: int32, as in `NpyDataSource.read`.
      target_segment_ids: int32, segment id of each target that takes loss and is in the segment of its input; else 0.
      loss: bool, whether each token takes loss; or float32, the weight of each token. None if every token takes loss, or if
        `target_segment_ids` already expresses the mask.
      pieces: Pieces of the rows. Columns outside of the pieces are padding. None if the reader did not compute the pieces, or
        if documents were replaced by padding afterwards (`withdrawn.py`).
    """

    inputs: Int32[np.ndarray, "rows length"]
    targets: Int32[np.ndarray, "rows length"]
    positions: Int32[np.ndarray, "rows length"]
    segment_ids: Int32[np.ndarray, "rows length"]
    target_segment_ids: Int32[np.ndarray, "rows length"]
    loss: Array | None
    pieces: Pieces | None = None


class Arrays:
    """Thread-safe allocator of arrays. It reuses the memory of an array when no object, not even a view, refers to the array.

    The first write to new memory of some hundred KB takes up to 10 times as long as later writes, because the system zeroes and
    maps its pages.

    Every array begins at the start or in the middle of a page (4096 bytes). A copy from byte 0 of one page to byte 8 of another
    may take up to 8 times as long: a processor compares only the low 12 bits of addresses to find out whether a load depends on
    an earlier store.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, list[Any]] = {}  # keys: the arguments of `empty` or `stack`
        self._bytes = 0  # size of all buffers in `_buffers`
        self._lock = ForkSafeLock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, half: int = 0) -> Array:
        """Return an uninitialised array. It begins at the start of a page or, if `half` is 1, in the middle of a page."""
        with self._lock.lock:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            buffer = self._unused((shape, dtype, half), _Buffer, size, half)
            return np.ndarray(shape, dtype, buffer.memory, buffer.begin)

    def stack(self, count: int, shape: tuple[int, int], views: Callable[[Stack], Any]) -> tuple[Any, list[Int32s]]:
        """Return the `views` of an unused stack, and the stack's `count` uninitialised int32 arrays.

        A stack is faster than `count` calls of `empty`. `views` is called once for each new stack. So calls with equal `count`
        and `shape` must pass the same function. The result of `views` must not refer to the `Stack`: such a cycle would keep
        the memory until a garbage collection.
        """
        with self._lock.lock:
            stack = self._unused((count, shape), Stack, count, shape, views)
            return stack.views, [*map(stack.array, stack.numbers)]

    def _unused(self, key: Hashable, kind: Callable[..., Any], *args: Any) -> Any:
        """Return a buffer that no array refers to: one that is kept under `key`, or a new `kind(*args)`."""
        for buffer in self._buffers.get(key, ()):
            # every array, and so every view of it, holds a reference to the memory
            if sys.getrefcount(buffer.memory) == buffer.references:
                return buffer
        buffer = kind(*args)
        buffer.references = sys.getrefcount(buffer.memory)  # before the buffer is kept: Ctrl-C may come between
        size = len(buffer.memory)
        if self._bytes + size > _KEPT:  # drop the buffers of other keys
            self._buffers = {key: self._buffers.get(key, [])}
            self._bytes = sum(len(other.memory) for other in self._buffers[key])
        kept = self._buffers.setdefault(key, [])
        if self._bytes + size <= _KEPT and len(kept) < _KEPT_OF_KEY:
            kept.append(buffer)
            self._bytes += size
        return buffer

    def __reduce__(self) -> tuple[type[Arrays], tuple[()]]:
        # a copy or a pickle begins without memory
        return type(self), ()


class _Buffer:
    """Memory of an array. The array begins at byte `begin` of `memory`."""

    def __init__(self, size: int, half: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(size + 2 * _PAGE, np.uint8)
        self.begin = -self.memory.__array_interface__["data"][0] % _PAGE + half * (_PAGE // 2)
        self.references = 0  # reference count of the memory when no array uses it


class Stack(_Buffer):
    """Memory of several int32 arrays, one after the other.

    Attributes:
      arrays: int32 [count, rows, L], all arrays.
      array, numbers: Function that returns array i, and `range(count)`. `map(array, numbers)` saves 2 % of the time of a batch
        of windows, compared with iteration over `arrays`.
      first, rows: memoryview of the first array, and list of the memoryviews of its rows.
      views: Result of the function `views`: the caller's views of this memory.
    """

    def __init__(self, count: int, shape: tuple[int, int], views: Callable[[Stack], Any]) -> None:
        rows, row_bytes = shape[0], shape[1] * 4
        step = -(-rows * row_bytes // _PAGE) * _PAGE + _PAGE // 2  # bytes per array: whole pages and half a page
        super().__init__(count * step, 1)
        self.arrays = np.ndarray((count, *shape), np.int32, self.memory, self.begin, (step, row_bytes, 4))
        self.array, self.numbers = self.arrays.__getitem__, range(count)
        self.first = self.memory.data[self.begin : self.begin + rows * row_bytes]
        self.rows = [self.first[at : at + row_bytes] for at in range(0, rows * row_bytes, row_bytes)]
        self.views: Any = views(self)
