"""One token file: a headerless raw array, as AI2 writes them under the name .npy, or a true .npy file.

The .npy format: https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.boundaries import BoundaryFile
from grain_sft.corpus.loss import LossFile
from grain_sft.errors import CorpusError
from grain_sft.storage import DIGEST_BYTES, MAGIC, digest_of, files, npy_header, read_head

TOKEN_DTYPES = ("uint8", "uint16", "uint32", "uint64")
DEFAULT_RAW_DTYPE = "uint32"

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
      loss: the file that says which of these tokens take loss; None: all do.
      boundaries: the file that says where documents begin and end; None: they end at each EOS.
      row: where tokens stand in rows, each with something else after it: tokens of a row, and how many would fit from where
        one begins to where the next one does; None: nothing is between tokens.
      version: version of a remote file, which is the only one that is read; None: not known.
      root: folder that the file has to lie in whenever it is opened; None: it may lie anywhere. Not saved.
    """

    path: str
    num_tokens: int
    size: int
    data_offset: int
    label: str
    digest: str
    loss: LossFile | None = None
    boundaries: BoundaryFile | None = None
    row: tuple[int, int] | None = None
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)


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
    size, head, version = read_head(path)
    if head.startswith(MAGIC):
        header_dtype, num_tokens, offset = _npy_array(path, head, size, version)
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
            check_plausible(path, head, dtype)
    first = head[offset : offset + DIGEST_BYTES]
    if len(first) < min(DIGEST_BYTES, size - offset):  # an unusually long header
        first = files.read_range(path, offset, offset + DIGEST_BYTES, version=version)
    tail_start = max(offset, size - DIGEST_BYTES)
    digest = digest_of(first, files.read_range(path, tail_start, size, version=version))
    return Shard(path, num_tokens, size, offset, label, digest, version=version), dtype


def _npy_array(path: str, head: bytes, size: int, version: str | None) -> tuple[np.dtype[np.unsignedinteger], int, int]:
    """(dtype, tokens, bytes before the data) of a .npy file."""
    descr, shape, offset = npy_header(path, head, size, version)
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


def check_plausible(path: str, head: bytes, dtype: np.dtype[np.unsignedinteger]) -> None:
    """Check that a file's first bytes read as token ids of a dtype that nobody gave.

    Raises:
      CorpusError: they don't.
    """
    whole = head[: len(head) // 8 * 8]
    sample: npt.NDArray[np.unsignedinteger] = np.frombuffer(whole, dtype)
    words: npt.NDArray[np.uint32] = np.frombuffer(whole, "<u4")
    looks_like_uint64 = dtype.itemsize == 4 and len(words) >= 16 and not words[1::2].any() and words[::2].any()
    if len(sample) and (int(sample.max()) >= _PLAUSIBLE_TOKEN or looks_like_uint64):
        raise CorpusError(
            f"{path}: a raw array whose first bytes don't read as {dtype.name} token ids, and no dtype was given. "
            "Give dtype=uint8, uint16, uint32 or uint64: the smallest that holds the vocabulary, as a rule."
        )
