"""Arrays placed so that copying into them is not slowed down."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

_PAGE = 4096


def empty_apart(
    shape: tuple[int, ...], dtype: npt.DTypeLike, source: npt.NDArray[Any] | None = None
) -> npt.NDArray[Any]:
    """An uninitialised array whose bytes lie half a page from those of `source`, or of a page's start, modulo pages.

    Processors tell loads from earlier stores by the low 12 bits of their addresses: where the place that is copied to is a
    few bytes after the place that is copied from, modulo 4096, each load waits for a store that it has nothing to do with.
    Such a copy takes up to 8 times as long, and with arrays of whole pages from malloc it is a matter of luck.
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw: npt.NDArray[np.uint8] = np.empty(size + _PAGE, np.uint8)
    wanted = _PAGE // 2 + (0 if source is None else _address(source) & ~63)
    return np.ndarray(shape, dtype, raw, (wanted - _address(raw)) % _PAGE)


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
