"""Array files: one-dimensional arrays, with a .npy header or raw (AI2's raw files are named .npy, too).

The .npy format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grain_sft.errors import CorpusError
from grain_sft.storage import DIGEST_BYTES, MAGIC, FileStamp, digest_of, files, npy_header, read_head

Dtype = np.dtype[Any]


class ArrayFile(NamedTuple):
    """A file, the dtype and number of its values, and their first and last 4 KiB."""

    stamp: FileStamp
    dtype: Dtype
    length: int
    first: bytes
    last: bytes


def scan_array(path: str, raw: Dtype, parse: Callable[[object], Dtype]) -> ArrayFile:
    """Return the array file at `path`. Its content decides whether it has a header. Arguments are as in `locate_values`."""
    size, head, version = read_head(path)
    dtype, count, offset = locate_values(path, head, size, raw, parse, version)
    first = head[offset : offset + DIGEST_BYTES]
    if len(first) < min(DIGEST_BYTES, size - offset):  # after an unusually long header
        first = files.read_range(path, offset, offset + DIGEST_BYTES, version=version)
    last = files.read_range(path, max(offset, size - DIGEST_BYTES), size, version=version)
    return ArrayFile(FileStamp(path, size, digest_of(first, last), offset, version), dtype, count, first, last)


def locate_values(
    path: str, head: bytes, size: int, raw: Dtype, parse: Callable[[object], Dtype], version: str | None = None
) -> tuple[Dtype, int, int]:
    """Return (dtype, number of values, offset of the first) of a file of `size` bytes that begins with `head`.

    Args:
      raw: Dtype of a file without a header.
      parse: Function that returns the dtype that a header states, or raises CorpusError.
    """
    if not head.startswith(MAGIC):
        count, rest = divmod(size, raw.itemsize)
        if rest:
            raise CorpusError(
                f"{path}: {size} bytes is not a multiple of {raw.itemsize}, the size of a {raw.name}. It was cut short, or "
                "its dtype is another: tokens are uint8, uint16, uint32 or uint64, as `dtype` states."
            )
        return raw, count, 0
    stated, shape, offset = npy_header(path, head, size, version)
    dtype = parse(stated)
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 0:
        raise CorpusError(f"{path}: the array has shape {shape}; expected one dimension. Save array.reshape(-1).")
    if shape[0] * dtype.itemsize != size - offset:
        raise CorpusError(
            f"{path}: the header promises {shape[0]} values ({shape[0] * dtype.itemsize} bytes), but {size - offset} bytes "
            "follow it. The file was truncated or appended to; write it again."
        )
    return dtype, shape[0], offset
