"""Array files: files of a one-dimensional array, with a .npy header or without a header (raw). AI2 names raw files .npy, too.

The .npy format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

import ast
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import FileStamp, ForkSafeLock, file_stamp, files
from grain_sft.types import Bools

Dtype = np.dtype[Any]

MAGIC = b"\x93NUMPY"

# One thread at a time parses a header: in CPython 3.11, `ast.literal_eval` in two threads at once may raise SystemError,
# because the parsers of all threads share a depth counter.
_PARSER_LOCK = ForkSafeLock()


class ArrayFile(NamedTuple):
    """A file, the dtype and number of its values, and the values' first and last 4 KiB."""

    stamp: FileStamp
    dtype: Dtype
    length: int
    first: bytes
    last: bytes


def scan_array(path: str, raw_dtype: Dtype, codes: Sequence[str] = ()) -> ArrayFile:
    """Return the array file at `path`. Other arguments are those of `find_data`."""
    size, head, version = file_stamp.read_head(path)
    dtype, count, offset = find_data(path, head, size, raw_dtype, codes)
    first = head[offset : offset + file_stamp.DIGEST_BYTES]  # `head` is long enough for the longest header and these bytes
    last = files.read_range(path, max(offset, size - file_stamp.DIGEST_BYTES), size, version=version)
    digest = file_stamp.digest_of(first, last)
    return ArrayFile(FileStamp(path, size, digest, offset, version), dtype, count, first, last)


def first_true(mask: Bools) -> int | None:
    """Return the index of the first True in `mask`; None if all are False."""
    indices = np.flatnonzero(mask)
    return int(indices[0]) if len(indices) else None


def dtype_code(dtype: object) -> str:
    """Return the text of a dtype without its byte order, unless this is big-endian: "u4" for "<u4", but ">u4" for ">u4"."""
    text = str(dtype)
    return text[1:] if text.startswith(("<", "=", "|")) else text


def find_data(path: str, head: bytes, size: int, raw_dtype: Dtype, codes: Sequence[str] = ()) -> tuple[Dtype, int, int]:
    """Return the dtype, the number of values and the byte offset of the first value of a file of `size` bytes.

    Args:
      head: First bytes of the file.
      raw_dtype: Dtype of the values if the file is raw.
      codes: Dtypes that a header may state besides `raw_dtype`, such as "f4" for little-endian float32.
    """
    if not head.startswith(MAGIC):
        if size % raw_dtype.itemsize:
            problem = f"{path}: {size} bytes is not a multiple of {raw_dtype.itemsize}, the size of a {raw_dtype.name}"
            raise CorpusError(f"{problem}. Copy the file again if it was cut short, or give the dtype of its tokens.")
        return raw_dtype, size // raw_dtype.itemsize, 0
    header_dtype, shape, offset = parse_header(path, head, size)
    code = dtype_code(header_dtype)
    allowed = (*codes, raw_dtype.str[1:])  # `str` is "<u4", and the code "u4"
    if code not in allowed:
        names = ", ".join(dict.fromkeys(np.dtype(code).name for code in allowed))
        problem = f"{path}: its .npy header states dtype {shortened(repr(header_dtype))}"
        raise CorpusError(f"{problem}; expected little-endian {names}. Convert the array with numpy's astype.")
    dtype = np.dtype(code)
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 0:
        raise CorpusError(f"{path}: the array has shape {shape}; expected one dimension. Save array.reshape(-1).")
    if shape[0] * dtype.itemsize != size - offset:
        problem = f"{path}: the header promises {shape[0]} values ({shape[0] * dtype.itemsize} bytes)"
        raise CorpusError(f"{problem}, but {size - offset} bytes follow it. Write the file again.")
    return dtype, shape[0], offset


def parse_header(path: str, head: bytes, size: int) -> tuple[object, tuple[object, ...], int]:
    """Parse the header of a .npy file of `size` bytes. Return the dtype as stated, the shape, and the byte offset of the data.

    `numpy.lib.format` is not used: it makes a dtype of any text, and np.dtype("m8[s/0]") kills the process (numpy 2).
    """
    version = list(head[len(MAGIC) : len(MAGIC) + 2])
    if version not in ([1, 0], [2, 0], [3, 0]):
        raise CorpusError(f"{path}: .npy format version {version}; expected [1, 0], [2, 0] or [3, 0]. Save it again.")
    start = len(MAGIC) + (4 if version[0] == 1 else 6)  # after 2 bytes of version, and 2 or 4 bytes of length
    length = int.from_bytes(head[len(MAGIC) + 2 : start], "little")
    offset = start + length
    if offset > min(size, file_stamp.MOST_HEADER_BYTES):
        problem = f"{path}: the .npy header claims {length} bytes, but the file has {size}, and a header has at most"
        raise CorpusError(f"{problem} {file_stamp.MOST_HEADER_BYTES}. Copy the file again.")
    try:
        with _PARSER_LOCK.lock:
            header = ast.literal_eval(head[start:offset].decode("utf-8" if version[0] == 3 else "latin1"))
        descr, shape = header["descr"], tuple(header["shape"])
        header["fortran_order"]  # numpy requires this key; both orders are the same in one dimension
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        problem = f"{path}: the .npy header at byte {len(MAGIC) + 2} can't be parsed ({error})"
        raise CorpusError(f"{problem}. Copy the file again.") from error
    return descr, shape, offset
