"""Arrays of a batch: from memory that is used again, and placed so that copying into them is not slowed down."""

from __future__ import annotations

import math
import sys
import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.forks import renew_lock

_PAGE = 4096
_KEPT = 1 << 28  # bytes in all


class _Buffer(NamedTuple):
    memory: npt.NDArray[np.uint8]
    begin: int  # where an array begins in it


class Arrays:
    """Makes arrays, each of memory that nobody else holds an array of.

    A fresh array of some hundred KB is as a rule memory that the system hands out page by page, zeroed, while it is being
    written: that takes up to 10 times as long as the writing. Here memory is used again once the last array of it is gone,
    views of it included. Safe in threads. What is kept is bounded, and goes with this object.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[tuple[int, ...], Any, int], list[_Buffer]] = {}
        self._bytes = 0
        self._lock = threading.Lock()
        renew_lock(self)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike, half: int = 0) -> npt.NDArray[Any]:
        """An uninitialised array that begins where a page does, or, with `half` 1, half a page after that.

        Processors tell loads from earlier stores by the low 12 bits of their addresses: where the place that is copied to
        is a few bytes after the place that is copied from, modulo 4096, each load waits for a store that it has nothing
        to do with. Such a copy takes up to 8 times as long, and with arrays from malloc it is a matter of luck.
        """
        key = (shape, dtype, half)
        with self._lock:
            kept = self._buffers.get(key)
            buffer = None if kept is None else _unheld(kept, _UNHELD)
            if buffer is None:
                buffer = self._make(key)
            return np.ndarray(shape, dtype, buffer[0], buffer[1])

    def _make(self, key: tuple[tuple[int, ...], Any, int]) -> _Buffer:
        shape, dtype, half = key
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if self._bytes + size > _KEPT:  # what is of other shapes makes room
            kept = self._buffers.get(key, [])
            self._buffers, self._bytes = {key: kept}, size * len(kept)
        memory: npt.NDArray[np.uint8] = np.empty(size + 2 * _PAGE, np.uint8)
        made = _Buffer(memory, -memory.__array_interface__["data"][0] % _PAGE + half * (_PAGE // 2))
        if self._bytes + size <= _KEPT:
            self._buffers.setdefault(key, []).append(made)
            self._bytes += size
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]


def _unheld(buffers: list[_Buffer], references: int) -> _Buffer | None:
    """The first whose memory has so many references."""
    for buffer in buffers:
        if sys.getrefcount(buffer[0]) == references:
            return buffer
    return None


_UNHELD = next(count for count in range(1, 9) if _unheld([_Buffer(np.empty(1, np.uint8), 0)], count) is not None)
"""References that `_unheld` counts to memory that only its list holds: those of the count itself are among them."""
