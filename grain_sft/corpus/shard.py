"""`Shard`, which describes one token file, and checks of dtypes and token ids."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from grain_sft.corpus.array_file import dtype_code, scan_array
from grain_sft.corpus.boundaries import BoundaryFile
from grain_sft.corpus.loss import LossFile
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import Count, FileStamp, file_stamp
from grain_sft.types import Array, Ints

Dtype = np.dtype[np.unsignedinteger]
TokenDtype = Literal["uint8", "uint16", "uint32", "uint64"]
TOKEN_DTYPES: tuple[str, ...] = get_args(TokenDtype)

_DTYPES: dict[str, Dtype] = {key: dtype for dtype in map(np.dtype, TOKEN_DTYPES) for key in (dtype.name, dtype.str[1:])}
"""Dtypes of tokens by their names, such as "uint32", and by their codes, such as "u4"."""

_PLAUSIBLE_TOKEN = 1 << 20  # no vocabulary in use is larger
_LLM_C = (b"\x88\xd8\x34\x01\1\0\0\0", b"\xa1\xd9\x34\x01\7\0\0\0")  # magic and version of llm.c's token files
_HEADERS = {**dict.fromkeys(_LLM_C, ("llm.c", 1024)), b"LITPKDS": ("lit-gpt", 24)}  # by the first bytes of a file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(FileStamp):
    """One token file, with the attributes of `FileStamp`.

    Attributes:
      num_tokens: Number of tokens in the file. If `boundaries.sequences` states a range of a Megatron file: number of tokens in
        this range.
      label: Label that a mix, a file of lines `label,path`, gives the file; "" without a mix.
      loss: File that states which of these tokens take loss; None if all tokens take loss.
      boundaries: File that states where documents begin and end; None if each EOS ends a document.
      row: None if tokens are contiguous. In a file that `grain-sft pack --materialize` wrote, the other arrays of a row follow
        its tokens. There, it is a pair such as (2048, 5120): the number of tokens of a row, and the distance from one row's
        start to the next, in units of one token.
    """

    num_tokens: Count
    label: str = ""
    loss: LossFile | None = None
    boundaries: BoundaryFile | None = None
    row: tuple[int, int] | None = None


def token_dtype(name: object, where: str) -> Dtype:
    """Return the dtype `name`. If `name` is not one of `TOKEN_DTYPES`, raise a CorpusError that begins with `where`."""
    dtype = _DTYPES.get(dtype_code(name.__name__ if isinstance(name, type) else name))  # `np.uint32` is a type
    if dtype is None:
        problem = f"{where}: dtype is {shortened(repr(name))}; expected little-endian {', '.join(TOKEN_DTYPES)}"
        raise CorpusError(f"{problem}. Convert the file with numpy's astype, or give its real dtype.")
    return dtype


def scan_shard(path: str, dtype: Dtype | None) -> tuple[Shard, Dtype]:
    """Return the token file at `path` as a shard, and the dtype of its tokens.

    A .npy header must agree with `dtype`. If `dtype` is None, a file without a header must look like uint32.
    """
    array = scan_array(path, dtype or np.dtype("uint32"), list(_DTYPES))
    tool, num_bytes = _foreign_header(array.first, array.stamp.size)
    if tool:
        problem = f"{path}: begins with the header of {tool}, {num_bytes:,} bytes that are not tokens"
        raise CorpusError(f"{problem}. Remove the header: tail -c +{num_bytes + 1} FILE > NEW_FILE.")
    file_stamp.refuse_lfs_pointer(path, array.first)
    if dtype not in (None, array.dtype):
        raise CorpusError(f"{path}: its .npy header states {array.dtype}, but dtype={dtype} was given. Omit dtype.")
    if dtype is None and not array.stamp.data_offset:  # a file without a header
        check_plausible(path, array.first, array.dtype)
    return Shard(**vars(array.stamp), num_tokens=array.length), array.dtype


def _foreign_header(head: bytes, size: int) -> tuple[str, int]:
    """Return the tool whose header a file of `size` bytes has, and the bytes of the header; ("", 0) for a file without one."""
    words = np.frombuffer(head[: len(head) // 4 * 4], "<u4").astype(np.int64)
    # A chunk of LitData begins with the number of its items, the offset of the first byte of each, and the end of the last.
    offsets = words[1 : 2 + int(words[:1].sum())]
    ascends = len(offsets) > 1 and offsets[0] == 4 * (words[0] + 2) and (np.diff(offsets) >= 0).all()
    if ascends and (offsets[-1] == size or 4 * len(offsets) + 4 == file_stamp.DIGEST_BYTES):  # or `head` ends before them
        return "LitData", int(offsets[0])
    return next((header for magic, header in _HEADERS.items() if head.startswith(magic)), ("", 0))


def check_plausible(path: str, head: bytes, dtype: Dtype) -> None:
    """Refuse a raw file whose first bytes, `head`, don't look like token ids of the inferred `dtype`."""
    head = head[: len(head) // 8 * 8]  # whole values of any dtype
    tokens, words = np.frombuffer(head, dtype), np.frombuffer(head, "<u4")
    # if uint64 ids are read as uint32, every second value is 0
    looks_like_uint64 = dtype.itemsize == 4 and len(words) >= 16 and not words[1::2].any() and words[::2].any()
    if len(tokens) and (int(tokens.max()) >= _PLAUSIBLE_TOKEN or looks_like_uint64):
        problem = f"{path}: a raw array whose first bytes don't read as {dtype.name} token ids, and no dtype was given"
        raise CorpusError(f"{problem}. Give dtype=uint8, uint16, uint32 or uint64, usually the smallest that fits.")


def as_token_id(name: str, token_id: object, dtype: Dtype, signed: bool) -> int | None:
    """Return `token_id` as an int. Raise a CorpusError about the argument `name` if no token can have this id.

    `signed` states that the files hold signed integers. As tokens are not negative, they are in the lower half of `dtype`.
    """
    if token_id is None:
        return None
    highest = int(np.iinfo(dtype).max) // (2 if signed else 1)
    if isinstance(token_id, bool) or not isinstance(token_id, int | np.integer) or not 0 <= token_id <= highest:
        raise CorpusError(f"{name}={token_id!r}: expected an id that {dtype.name} holds, 0 to {highest}. Fix the id.")
    return int(token_id)


def check_signed(tokens: Array, shards: Sequence[Shard], dtype: Dtype, pieces: Callable[[], tuple[Ints, ...]]) -> None:
    """Raise CorpusError if files of signed integers hold a negative token.

    Args:
      tokens: Tokens that were read from `shards` as `dtype`, or the same tokens cast to int32.
      dtype: Unsigned dtype that has as many bits as the integers in the files.
      pieces: Function that returns where the tokens are stored, for the error message. It returns three arrays, int64 [pieces]:
        the shard of each piece, its token offset in the shard, and its first index in the flattened `tokens` (ascending).
    """
    # A negative token that was read as an unsigned integer is in the upper half of the range: -1 as uint16 is 65535.
    # Tokens that were cast from uint32 to int32 are cast back. Tokens of 64 bits are checked before they are cast.
    flat = tokens.reshape(-1)
    if tokens.dtype.kind == "i" and tokens.itemsize == dtype.itemsize:
        flat = flat.view(dtype)
    highest = int(np.iinfo(dtype).max) // 2
    if not len(flat) or flat.max() <= highest:
        return
    index = int(np.flatnonzero(flat > highest)[0])
    shard, start_in_shard, start_in_tokens = pieces()
    piece = int(np.searchsorted(start_in_tokens, index, side="right")) - 1
    file = shards[int(shard[piece])]
    token_offset = int(start_in_shard[piece]) + index - int(start_in_tokens[piece])
    byte = file.data_offset + token_offset * dtype.itemsize
    value = int(flat[index]) - 2 * (highest + 1)  # as a signed integer: 65535 in a file of int16 is -1
    problem = f"{file.path}: byte {byte}: token {token_offset} is {value}; expected 0 or more"
    raise CorpusError(f"{problem}. Write the files again, and check every token with `grain-sft verify --full`.")
