"""One token file: a headerless raw array, as AI2 writes them under the name .npy, or a true .npy file.

The .npy format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import io
import os
import struct

import numpy as np
import numpy.typing as npt

from grain_sft import files
from grain_sft.errors import CorpusError, CorpusFileError

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64")
DEFAULT_RAW_DTYPE = "uint32"

_MAGIC = b"\x93NUMPY"
_HEADER_LIMIT = 1 << 16  # bytes; numpy's own headers of 1-D integer arrays take 128
DIGEST_BYTES = 4096  # hashed at each end of the tokens
_PLAUSIBLE_TOKEN = 1 << 20  # no vocabulary in use is larger


@dataclasses.dataclass(frozen=True)
class Shard:
    """Where the tokens of one file are, and what tells this file from another.

    Attributes:
      path: local path, or URL.
      num_tokens: tokens in the file.
      size: bytes of the whole file.
      data_offset: bytes before the first token: 0 in a raw array, the header's length in a .npy file.
      label: the mix's name for the source of these tokens; "" where there is none.
      digest: hash of the first and the last 4 KiB of tokens.
    """

    path: str
    num_tokens: int
    size: int
    data_offset: int
    label: str
    digest: str


def token_dtype(name: object, where: str) -> np.dtype[np.unsignedinteger]:
    """The numpy dtype of that name, if it is one that tokens are stored in."""
    try:
        dtype: np.dtype[np.unsignedinteger] = np.dtype(name)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses 'u4,u4' and the like as Python
        raise CorpusError(f"{where}: {name!r} is no dtype; expected one of {', '.join(TOKEN_DTYPES)}.") from error
    if dtype.name not in TOKEN_DTYPES or not dtype.isnative:
        raise CorpusError(
            f"{where}: dtype is {dtype.str} ({dtype.name}); tokens are stored as little-endian {', '.join(TOKEN_DTYPES)}. "
            "Convert the file with numpy's astype, or give the dtype that it really has."
        )
    return dtype


def scan_shard(
    path: str, label: str, dtype: np.dtype[np.unsignedinteger] | None
) -> tuple[Shard, np.dtype[np.unsignedinteger]]:
    """Size, kind and ends of one file; header or not is told by content, never by name.

    Args:
      path: local path or URL.
      label: kept in the shard.
      dtype: of a raw file's tokens. None: a raw file is read as uint32 if its first bytes look like uint32 token ids.

    Raises:
      CorpusFileError: missing or unreadable.
      CorpusError: what it holds is not a one-dimensional array of unsigned integers, or not one of `dtype`.
    """
    size, head = _size_and_head(path)
    if head.startswith(_MAGIC):
        header_dtype, num_tokens, offset = _parse_npy_header(path, head, size)
        if dtype is not None and header_dtype != dtype:
            raise CorpusError(
                f"{path}: its .npy header says {header_dtype.name}, but dtype={dtype.name} was asked for. "
                "Leave dtype out, or give the header's."
            )
        dtype = header_dtype
    else:
        offset = 0
        guessed = dtype is None
        dtype = dtype or np.dtype(DEFAULT_RAW_DTYPE)
        num_tokens, rest = divmod(size, dtype.itemsize)
        if rest:
            raise CorpusError(
                f"{path}: {size} bytes is not a multiple of {dtype.itemsize}, the size of a {dtype.name} token. "
                "The file is truncated or its dtype is another: give dtype=uint8, uint16, uint32 or uint64."
            )
        if guessed:
            _check_looks_like_default(path, head)
    first = head[offset : offset + DIGEST_BYTES]
    if len(first) < min(DIGEST_BYTES, size - offset):  # an unusually long header
        first = _read(path, offset, DIGEST_BYTES)
    tail_start = max(offset, size - DIGEST_BYTES)
    digest = digest_of(first, _read(path, tail_start, size - tail_start))
    return Shard(path, num_tokens, size, offset, label, digest), dtype


def read_digest(fd: int, shard: Shard) -> str:
    """The digest of the open local file `fd`, to be compared with `shard.digest`."""
    tail_start = max(shard.data_offset, shard.size - DIGEST_BYTES)
    head = os.pread(fd, DIGEST_BYTES, shard.data_offset)
    return digest_of(head, os.pread(fd, DIGEST_BYTES, tail_start))


def digest_of(head: bytes, tail: bytes) -> str:
    """The digest of the first and the last `DIGEST_BYTES` of tokens."""
    return hashlib.blake2b(head + b"\0" + tail, digest_size=16).hexdigest()


def _size_and_head(path: str) -> tuple[int, bytes]:
    """Bytes of the file, and its first bytes: all that a header and a digest need."""
    want = DIGEST_BYTES + 128
    if files.is_remote(path):
        with files.remote(path) as client:
            size = int(client.info(path)["size"])
            return size, bytes(client.cat_file(path, start=0, end=min(size, want))) if size else b""
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size, file.read(want)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorpusFileError(
            f"{path}: no such file. Check the path, or map it to where the data are with path_remap."
        ) from error
    except (OSError, ValueError) as error:  # ValueError: no file can have that name
        raise CorpusFileError(f"{path}: can't be read ({error}).") from error


def _read(path: str, start: int, count: int) -> bytes:
    if files.is_remote(path):
        with files.remote(path) as client:
            return bytes(client.cat_file(path, start=start, end=start + count)) if count else b""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(count)
    except OSError as error:
        raise CorpusFileError(f"{path}: can't be read at byte {start} ({error}).") from error


def _parse_npy_header(path: str, head: bytes, size: int) -> tuple[np.dtype[np.unsignedinteger], int, int]:
    """(dtype, tokens, bytes before the data) of a .npy file, format version 1, 2 or 3."""
    stream = io.BytesIO(head)
    stream.seek(len(_MAGIC))
    version = list(stream.read(2))
    if version not in ([1, 0], [2, 0], [3, 0]):
        raise CorpusError(f"{path}: .npy format version {version}; versions [1, 0], [2, 0] and [3, 0] can be read.")
    length_format = "<H" if version[0] == 1 else "<I"
    field = stream.read(struct.calcsize(length_format))
    if len(field) < struct.calcsize(length_format):
        raise CorpusError(f"{path}: the .npy header breaks off after {size} bytes.")
    length = struct.unpack(length_format, field)[0]
    offset = stream.tell() + length
    if length > _HEADER_LIMIT or offset > size:
        raise CorpusError(
            f"{path}: the .npy header claims {length} bytes, but the file has {size} and a header of a token array "
            f"at most {_HEADER_LIMIT}. The file is damaged."
        )
    text = stream.read(length) if offset <= len(head) else _read(path, stream.tell(), length)
    try:
        header = ast.literal_eval(text.decode("utf-8" if version[0] == 3 else "latin1"))
        descr, shape = header["descr"], tuple(header["shape"])
        header["fortran_order"]  # has to be there, and is all one in 1-D
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CorpusError(f"{path}: the .npy header at byte {len(_MAGIC) + 2} can't be parsed ({error}).") from error
    dtype = token_dtype(descr, path)
    if len(shape) != 1 or not isinstance(shape[0], int) or shape[0] < 0:
        raise CorpusError(
            f"{path}: the array has shape {shape}; tokens are one-dimensional. Save it flattened: array.reshape(-1)."
        )
    found = size - offset
    if found != shape[0] * dtype.itemsize:
        raise CorpusError(
            f"{path}: the header promises {shape[0]} tokens ({shape[0] * dtype.itemsize} bytes), "
            f"but {found} bytes follow it. The file was truncated or appended to; write it again."
        )
    return dtype, shape[0], offset


def _check_looks_like_default(path: str, head: bytes) -> None:
    sample: npt.NDArray[np.uint32] = np.frombuffer(head[: len(head) // 8 * 8], dtype="<u4")
    looks_like_uint64 = len(sample) >= 16 and not sample[1::2].any() and sample[::2].any()
    if len(sample) and (int(sample.max()) >= _PLAUSIBLE_TOKEN or looks_like_uint64):
        raise CorpusError(
            f"{path}: a raw array whose first bytes don't read as uint32 token ids, and no dtype was given. "
            "Give dtype=uint8, uint16, uint32 or uint64: the smallest that holds the vocabulary, as a rule."
        )
