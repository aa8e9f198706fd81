"""Shard: one token file; and RowFormat: how the rows that `grain-sft pack --materialize` writes are stored in it."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, Self, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.corpus.array_file import scan_array
from grain_sft.corpus.boundaries import BoundaryFile
from grain_sft.corpus.loss import LossFile
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import Count, FileStamp

Dtype = np.dtype[np.unsignedinteger]
TokenDtype = Literal["uint8", "uint16", "uint32", "uint64"]
TOKEN_DTYPES: tuple[str, ...] = get_args(TokenDtype)
Positive = Annotated[int, msgspec.Meta(ge=1)]
LONG_SEGMENT = 1 << 10  # tokens

_PLAUSIBLE_TOKEN = 1 << 20  # no vocabulary in use is larger
_ROW_ALIGNMENT = 8  # bytes
# numpy divides by zero at others, such as m8[s/0], which ends the process
_SAFE_DTYPE = re.compile(r"[<>=|]?\w+(\[\w*\])?")
_PlaneDtype = Annotated[str, msgspec.Meta(pattern="^(uint8|uint16|uint32)?$")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard(FileStamp):
    """One token file, with the attributes of `FileStamp`.

    Attributes:
      num_tokens: Number of tokens in the file.
      label: Name of the source of these tokens in a mix; "" where there is none.
      loss: File that states which of these tokens take loss; None: all do.
      boundaries: File that states where documents begin and end; None: they end at each EOS.
      row: Number of tokens in a written row, and from its beginning to that of the next, both in tokens, since other arrays
        follow its tokens; None: tokens are contiguous.
    """

    num_tokens: Count
    label: str = ""
    loss: LossFile | None = None
    boundaries: BoundaryFile | None = None
    row: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """The layout of materialized rows on disk: each row's tokens, followed by the arrays that belong to them.

    One read gets a whole row. The arrays are small integers or, where segments are long, the offsets of segment ends.

    Attributes:
      sequence_length: Number of tokens in every row. A shard holds whole rows.
      positions_dtype: "uint8", "uint16" or "uint32"; "" where rows hold the ends of their segments.
      segments_dtype: "uint8", "uint16" or "uint32"; "" where rows hold the ends of their segments and all tokens take loss.
      most_segments: Highest number of segments of a row, where rows hold the ends of their segments; else 0.
      made_of: Corpus and layout that the rows come from, with their fingerprints, as text.
    """

    sequence_length: Positive
    positions_dtype: _PlaneDtype
    segments_dtype: _PlaneDtype
    most_segments: Count
    made_of: Annotated[str, msgspec.Meta(min_length=1)]

    @classmethod
    def of(cls, sequence_length: int, mean_segments: float, most_segments: int, has_loss: bool, made_of: str) -> Self:
        """Return the smallest format for rows with these segments. Few long segments are stored by their ends."""
        segments = np.min_scalar_type(most_segments).name
        if are_long(sequence_length, mean_segments) and 8 * most_segments <= sequence_length:
            return cls(sequence_length, "", segments if has_loss else "", most_segments, made_of)
        return cls(sequence_length, np.min_scalar_type(sequence_length - 1).name, segments, 0, made_of)

    def dtype(self, tokens: npt.DTypeLike) -> np.dtype[Any]:
        """Return the structured dtype of one row, for tokens of a dtype.

        Its fields are `tokens`, `positions`, `segment_ids` and `target_segment_ids` (0 where no loss is taken), each
        [sequence_length]. Rows that hold the ends of their segments have, instead of positions and segment ids, `ends`:
        int64 [1 + most_segments], the number of segments and the index after the last token of each.
        """
        length = self.sequence_length
        planes: dict[str, tuple[npt.DTypeLike, int]] = {"tokens": (tokens, length)}
        if self.most_segments:
            planes["ends"] = np.int64, 1 + self.most_segments
        else:
            planes |= {"positions": (self.positions_dtype, length), "segment_ids": (self.segments_dtype, length)}
        if self.segments_dtype:
            planes["target_segment_ids"] = self.segments_dtype, length
        formats = [(np.dtype(dtype).newbyteorder("<"), (count,)) for dtype, count in planes.values()]
        offsets, size = [], 0
        for name, dtype in zip(planes, formats, strict=True):
            offsets.append(_aligned(size) if name == "ends" else size)
            size = offsets[-1] + np.dtype(dtype).itemsize
        return np.dtype({"names": list(planes), "formats": formats, "offsets": offsets, "itemsize": _aligned(size)})


def are_long(sequence_length: int, mean_segments: float) -> bool:
    """Return whether rows with this mean number of segments are faster to make segment by segment."""
    return sequence_length >= LONG_SEGMENT * mean_segments


def _aligned(size: int) -> int:
    return -(-size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT


def token_dtype(name: object, where: str) -> Dtype:
    """Return the numpy dtype `name`. It is a CorpusError, whose message begins with `where`, if no tokens are stored in it."""
    expected = f"tokens are stored as little-endian {', '.join(TOKEN_DTYPES)}"
    if isinstance(name, str | bytes | list | tuple | dict) and not _SAFE_DTYPE.fullmatch(str(name)):
        raise CorpusError(f"{where}: dtype is {shortened(repr(name))}; {expected}. Convert or replace the file.")
    try:
        dtype: Dtype = np.dtype(name)  # type: ignore[call-overload]
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses 'u4,u4' and the like as Python
        raise CorpusError(f"{where}: {name!r} is not a dtype; expected one of {', '.join(TOKEN_DTYPES)}.") from error
    if dtype.name not in TOKEN_DTYPES or not dtype.isnative:
        raise CorpusError(
            f"{where}: dtype is {dtype.str} ({dtype.name}); {expected}. Convert the file with numpy's astype, or give its real "
            "dtype."
        )
    return dtype


def scan_shard(path: str, dtype: Dtype | None) -> tuple[Shard, Dtype]:
    """Return one token file as a shard, and its dtype. Without `dtype`, a raw file is uint32, if it looks like token ids."""

    def parse(stated: object) -> Dtype:
        found = token_dtype(stated, path)
        if dtype not in (None, found):
            raise CorpusError(f"{path}: its .npy header states {found}, but dtype={dtype} was given. Leave it out.")
        return found

    found = scan_array(path, dtype or np.dtype("uint32"), parse)
    if dtype is None and not found.stamp.data_offset:
        check_plausible(path, found.first, found.dtype)
    return Shard(**vars(found.stamp), num_tokens=found.length), found.dtype


def check_plausible(path: str, head: bytes, dtype: Dtype) -> None:
    """Refuse a file whose first bytes are not plausible token ids of `dtype`, which the caller did not give."""
    whole = head[: len(head) // 8 * 8]
    sample, words = np.frombuffer(whole, dtype), np.frombuffer(whole, "<u4")
    looks_like_uint64 = dtype.itemsize == 4 and len(words) >= 16 and not words[1::2].any() and words[::2].any()
    if len(sample) and (int(sample.max()) >= _PLAUSIBLE_TOKEN or looks_like_uint64):
        raise CorpusError(
            f"{path}: a raw array whose first bytes don't read as {dtype.name} token ids, and no dtype was given. "
            "Give dtype=uint8, uint16, uint32 or uint64: usually the smallest that holds the vocabulary."
        )


def highest_token(dtype: Dtype, signed: bool) -> int:
    """Return the highest token id that a dtype holds; half as many fit in files of signed integers."""
    return int(np.iinfo(dtype).max) >> signed


def check_signed(
    tokens: npt.NDArray[np.integer],
    shards: Sequence[Shard],
    dtype: Dtype,
    pieces: Callable[[], tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> None:
    """Refuse negative tokens of shards of signed integers of the width of `dtype`. They are read as unsigned ones or as int32.

    `pieces` is called for the message only. It returns the shard, the first token in it, and the place in `tokens`, flattened,
    of each piece of `tokens`, each int64 [pieces], in the order of these places.
    """
    flat = tokens.reshape(-1)
    if tokens.dtype.kind == "i" and tokens.itemsize == dtype.itemsize:
        flat = flat.view(dtype)
    limit = highest_token(dtype, True)
    if not len(flat) or flat.max() <= limit:
        return
    at = int(np.flatnonzero(flat > limit)[0])
    shard, start, place = pieces()
    piece = int(np.searchsorted(place, at, side="right")) - 1
    file, offset = shards[int(shard[piece])], int(start[piece]) + at - int(place[piece])
    raise CorpusError(
        f"{file.path}: byte {file.data_offset + offset * dtype.itemsize}: token {offset} is {int(flat[at]) - 2 * (limit + 1)}; "
        f"expected 0 or more. The files store signed integers. Find what wrote it, and write the corpus again; `grain-sft "
        "verify --full` reads every token and names the first such one."
    )
