"""Array files: one-dimensional arrays, with a .npy header or raw (AI2's raw files are named .npy, too).

The .npy format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from grain_sft.errors import CorpusError
from grain_sft.storage import DIGEST_BYTES, MOST_HEADER_BYTES, FileStamp, ForkSafeLock, digest_of, files, read_head

Dtype = np.dtype[Any]

MAGIC = b"\x93NUMPY"

_PARSING = ForkSafeLock()  # CPython 3.11 counts the parser's depth for all threads together, and raises SystemError


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
    dtype, count, offset = locate_values(path, head, size, raw, parse)
    first = head[offset : offset + DIGEST_BYTES]
    last = files.read_range(path, max(offset, size - DIGEST_BYTES), size, version=version)
    return ArrayFile(FileStamp(path, size, digest_of(first, last), offset, version), dtype, count, first, last)


def header_of(path: str, headers: tuple[str, ...], dtype: Dtype) -> Callable[[object], Dtype]:
    """Return a `parse` for `scan_array` that returns `dtype` if a header states one of the dtypes `headers`."""

    def parse(stated: object) -> Dtype:
        if stated not in headers:
            raise CorpusError(f"{path}: its .npy header states dtype {stated!r}; expected {headers[0]!r}.")
        return dtype

    return parse


def locate_values(
    path: str, head: bytes, size: int, raw: Dtype, parse: Callable[[object], Dtype]
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
    stated, shape, offset = parse_header(path, head, size)
    dtype = parse(stated)
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 0:
        raise CorpusError(f"{path}: the array has shape {shape}; expected one dimension. Save array.reshape(-1).")
    if shape[0] * dtype.itemsize != size - offset:
        raise CorpusError(
            f"{path}: the header promises {shape[0]} values ({shape[0] * dtype.itemsize} bytes), but {size - offset} bytes "
            "follow it. The file was truncated or appended to; write it again."
        )
    return dtype, shape[0], offset


def parse_header(path: str, head: bytes, size: int) -> tuple[object, tuple[object, ...], int]:
    """Return (dtype as the header states it, shape, bytes before the data) of a .npy file of `size` bytes.

    Raises:
      CorpusError: The header is damaged, or of a version that numpy does not write.
    """
    version = list(head[len(MAGIC) : len(MAGIC) + 2])
    if version not in ([1, 0], [2, 0], [3, 0]):
        raise CorpusError(f"{path}: .npy format version {version}; versions [1, 0], [2, 0] and [3, 0] can be read.")
    start = len(MAGIC) + (4 if version[0] == 1 else 6)
    length = int.from_bytes(head[len(MAGIC) + 2 : start], "little")
    offset = start + length
    if offset > min(size, MOST_HEADER_BYTES):
        raise CorpusError(
            f"{path}: the .npy header claims {length} bytes, but the file has {size} and a header of a token array "
            f"at most {MOST_HEADER_BYTES}. The file is damaged."
        )
    try:
        with _PARSING.lock:
            header = ast.literal_eval(head[start:offset].decode("utf-8" if version[0] == 3 else "latin1"))
        descr, shape = header["descr"], tuple(header["shape"])
        header["fortran_order"]  # required, but meaningless for one dimension
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CorpusError(f"{path}: the .npy header at byte {len(MAGIC) + 2} can't be parsed ({error}).") from error
    return descr, shape, offset
