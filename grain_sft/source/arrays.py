"""Arrays of a batch: from memory that is used again, and placed so that copying into them is not slowed down."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.storage import ForkSafeLock

if TYPE_CHECKING:
    from jaxtyping import Int32

Element = dict[str, npt.NDArray[Any]]
"""What sources give and transforms take: arrays [L] of a row or [rows, L] of a batch."""

Int32s = npt.NDArray[np.int32]

_PAGE = 4096
_KEPT = 1 << 28  # bytes in all


class ReadRows(NamedTuple):
    """Rows as `ShiftTargets` makes them, arrays [rows, L] that are made while the rows are read.

    Attributes:
      inputs: int32, tokens.
      targets: int32, the token after each, 0 at the end of a row.
      positions, segment_ids: int32, as of `NpyDataSource.read`.
      target_segment_ids: int32, segment ids of the targets that take loss and are of the same segment; else 0.
      loss: bool, tokens that take loss, or float32, their weights; None where every token takes it, and where a mask decides
        nothing but `target_segment_ids`.
    """

    inputs: Int32[np.ndarray, "rows length"]
    targets: Int32[np.ndarray, "rows length"]
    positions: Int32[np.ndarray, "rows length"]
    segment_ids: Int32[np.ndarray, "rows length"]
    target_segment_ids: Int32[np.ndarray, "rows length"]
    loss: npt.NDArray[Any] | None


class Arrays:
    """Makes arrays, each of memory that nobody else holds an array of. Safe in threads.

    A fresh array of some hundred KB is usually memory that the system hands out page by page, zeroed, while it is being
    written: that takes up to 10 times as long as the writing. Here memory is used again once the last array of it is gone,
    views of it included. The memory that is kept is bounded, and goes with this object.

    Processors tell loads from earlier stores by the low 12 bits of their addresses: where the destination of a copy is a few
    bytes after its source, modulo 4096, each load waits for an unrelated store. Such a copy takes up to 8 times as long, and
    with arrays from malloc it is a matter of luck. So these begin where a page does, or half a page after that.
    """

    def __init__(self) -> None:
        self._buffers: dict[Hashable, list[Any]] = {}  # of each kind, of one class
        self._bytes = 0
        self._lock = ForkSafeLock()

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, half: int = 0) -> npt.NDArray[Any]:
        """Return an uninitialised array that begins where a page does, or, with `half` 1, half a page after that."""
        with self._lock.lock:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            buffer = self._free((shape, dtype, half), lambda: _Buffer(size, half))
            return np.ndarray(shape, dtype, buffer.memory, buffer.begin)

    def stack(self, count: int, shape: tuple[int, int], views: Callable[[Stack], Any]) -> tuple[Any, list[Int32s]]:
        """Return `count` uninitialised int32 arrays of one shape in one memory, which is used again when all are gone; faster
        than making each. The first begins half a page after a page does, the second where one does, and so on in turn.

        Args:
          views: Function that makes the views of this memory that the caller needs each time. Calls with the same count and
            shape have the same.

        Returns:
          The result of `views` for this memory when it was new, and the arrays.
        """
        with self._lock.lock:
            stack = self._free((count, shape), lambda: Stack(count, shape, views))
            return stack.views, [*map(stack.array, stack.numbers)]

    def _free(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return a buffer without any array: one that is kept under `key`, or a new one."""
        for buffer in self._buffers.get(key, ()):
            if sys.getrefcount(buffer.memory) == buffer.references:
                return buffer
        buffer = make()
        buffer.references = sys.getrefcount(buffer.memory)  # before it is kept: Ctrl-C may arrive in between
        size = len(buffer.memory)
        if self._bytes + size > _KEPT:  # memory of other kinds makes room
            kept = self._buffers.get(key, [])
            self._buffers, self._bytes = {key: kept}, sum(len(each.memory) for each in kept)
        if self._bytes + size <= _KEPT:
            self._buffers.setdefault(key, []).append(buffer)
            self._bytes += size
        return buffer

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


class _Buffer:
    """Memory of an array, which begins at `begin` in it; `references` is their number without any array."""

    def __init__(self, size: int, half: int) -> None:
        self.memory: npt.NDArray[np.uint8] = np.empty(size + 2 * _PAGE, np.uint8)
        self.begin = -self.memory.__array_interface__["data"][0] % _PAGE + half * (_PAGE // 2)
        self.references = 0


class Stack(_Buffer):
    """Memory of several arrays of int32, one after the other.

    Attributes:
      arrays: int32 [count, rows, L], all of them.
      array: Function that returns the array of one of `numbers`: faster than iterating over `arrays`.
      first: Bytes of the first array.
      rows: Bytes of each of its rows.
      views: Views of this memory, as its maker needs them.
    """

    def __init__(self, count: int, shape: tuple[int, int], views: Callable[[Stack], Any]) -> None:
        rows, row_bytes = shape[0], shape[1] * 4
        step = -(-rows * row_bytes // _PAGE) * _PAGE + _PAGE // 2
        super().__init__(count * step, 1)
        self.arrays = np.ndarray((count, *shape), np.int32, self.memory, self.begin, (step, row_bytes, 4))
        self.array, self.numbers = self.arrays.__getitem__, range(count)
        self.first = self.memory.data[self.begin : self.begin + rows * row_bytes]
        self.rows = [self.first[at : at + row_bytes] for at in range(0, rows * row_bytes, row_bytes)]
        self.views: Any = views(self)
