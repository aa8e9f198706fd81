"""The limit that speeds are compared with: one definition for every benchmark and for the report."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

LIMIT = "limit: numpy, contiguous rows"

_BYTES = 1 << 27  # of rows that are copied
_ROWS = 4096


def limit(batch: Mapping[str, npt.NDArray[Any]]) -> Callable[[], Any]:
    """Return a function that copies contiguous rows from memory into as many arrays as the batch has.

    The copies have the shapes and dtypes of the batch's arrays. An array under two keys counts once. The memory of the copies
    is used again: the system hands out fresh memory so slowly that it would be the limit instead.
    """
    arrays = list({id(array): array for array in batch.values()}.values())
    count, longest = len(arrays[0]), max(array[0].nbytes for array in arrays)
    ready = np.ones((max(count, min(_ROWS, _BYTES // longest)), longest), np.uint8)
    sources = [ready[:, : array[0].nbytes].view(array.dtype) for array in arrays]
    copies = [np.empty(array.shape, array.dtype) for array in arrays]
    starts = itertools.cycle(range(0, len(ready) - count + 1, count))

    def copy() -> list[npt.NDArray[Any]]:
        start = next(starts)
        for source, to in zip(sources, copies, strict=True):
            for row in range(count):
                to[row] = source[start + row]
        return copies

    return copy
