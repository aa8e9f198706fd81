"""Documents: where each document begins, and the sidecar files of three formats that state it for one shard."""

from __future__ import annotations

import dataclasses
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import MAGIC, describe, npy_header

if TYPE_CHECKING:
    from jaxtyping import Int64

Count = Annotated[int, msgspec.Meta(ge=0)]
Ints = npt.NDArray[np.int64]
BoundaryKind = Literal["csv", "pairs", "starts"]

_BLOCK = 1 << 22  # bytes of lines that are parsed at once
_LONGEST_LINE = 1 << 16  # with the names and paths of documents that Dolma's tokenizer writes
_MORE_COLUMNS = re.compile(rb"^(\d+,\d+),[^\n]*", re.MULTILINE)
_DIGITS = 18  # of a number that int64 surely holds


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """First token and length of every document, in order; unpacks as `start, length = documents`.

    Attributes:
      start: int64 [documents], token offsets, counted through all shards.
      length: int64 [documents], numbers of tokens.
      highest_token: Highest token id, if finding the documents read every token; else None.
      content: Hash of all bytes that decide where these documents are: of the boundary files, or of every token.
      tokens: Hash of every token, if finding the documents read all of them; else None.
    """

    start: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]
    highest_token: int | None = None
    content: str = ""
    tokens: str | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.start, self.length))


@dataclasses.dataclass(frozen=True)
class BoundaryFile:
    """The document boundaries of one shard.

    Attributes:
      path: Local path, or URL.
      kind: "csv" (gzipped lines `start,end`; more columns are ignored), "pairs" (uint64 pairs of start and length) or
        "starts" (int64 starts).
      size: Size of the file in bytes.
      digest: Hash of its first and last 4 KiB.
      continues: Whether the shard's first document began in the shard before; None: unknown.
      version: Version of a remote file; None: unknown.
      root: Folder that the file must lie in whenever it is opened; None: anywhere. It is not saved.
    """

    path: str
    kind: BoundaryKind
    size: Count
    digest: str
    continues: bool | None = None
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def data_offset(self) -> int:
        """Bytes before its data: 0."""
        return 0


def describe_boundaries(path: str, kind: BoundaryKind) -> BoundaryFile:
    """Return the file as it is now."""
    stamp = describe(path)
    return BoundaryFile(path, kind, stamp.size, stamp.digest, version=stamp.version)


def parse_boundaries(file: BoundaryFile, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Return (first token, length) of each document, int64 [documents], counted from the shard's first token."""
    return BOUNDARY_KINDS[file.kind](file.path, data, num_tokens)


def _parse_csv(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse lines `start,end`, ascending, with or without gaps. Further columns are ignored, as in OLMo-core.

    Memory is bounded by the number of documents, which can't exceed that of tokens, whatever the file unpacks to.
    """
    blocks = [np.empty((0, 2), np.int64)]
    line, before = 1, 0
    if not data:
        raise CorpusError(f"{path}: is empty; expected gzipped lines 'start,end'. It was cut short.")
    stream = gzip.GzipFile(fileobj=io.BytesIO(data))
    rest, block = b"", b" "
    while block:
        try:
            block = stream.read(_BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            raise CorpusError(
                f"{path}: can't be unpacked after line {line - 1} ({error}). It is cut short or damaged."
            ) from error
        if block:
            lines, newline, rest = (rest + block).rpartition(b"\n")
            lines += newline
        else:
            lines, rest = (rest + b"\n" if rest else b""), b""
        if len(rest) > _LONGEST_LINE:
            raise CorpusError(f"{path}:{line + lines.count(10)}: expected 'start,end', found {_short(rest)}.")
        if lines:
            numbers = _parse_lines(path, line, lines)
            _check_order(path, line, numbers, before, num_tokens)
            before = int(numbers[-1, 1])
            line += len(numbers)
            blocks.append(numbers)
    if len(blocks) == 1 and num_tokens:
        raise CorpusError(f"{path}: lists no document, but the part has {num_tokens} tokens.")
    start, end = np.concatenate(blocks).T.copy()
    return start, end - start


def _parse_lines(path: str, line: int, lines: bytes) -> Ints:
    """Return int64 [lines, 2] of whole lines, parsed all at once: about 20 ns a byte."""
    whole = lines = lines.replace(b"\r\n", b"\n")
    if lines.count(b",", 0, lines.index(b"\n")) > 1:  # start,end,id,src,loc
        lines = _MORE_COLUMNS.sub(rb"\1", lines)
    data = np.frombuffer(lines, np.uint8)
    separators = np.flatnonzero((data < 48) | (data > 57))
    widths = np.diff(separators, prepend=-1) - 1
    kinds = data[separators]
    right = len(kinds) % 2 == 0 and (kinds[0::2] == ord(",")).all() and (kinds[1::2] == ord("\n")).all()
    if not right or widths.min() < 1 or widths.max() > _DIGITS:
        for number, (text, shown) in enumerate(zip(lines.split(b"\n")[:-1], whole.split(b"\n"), strict=False), line):
            fields = text.split(b",")
            if len(fields) != 2 or not all(field.isdigit() and len(field) <= _DIGITS for field in fields):
                raise CorpusError(f"{path}:{number}: expected 'start,end' in digits, found {_short(shown)}.")
    values = np.zeros(len(separators), np.int64)
    for digit in range(int(widths.max())):  # from the last digit
        has = widths > digit
        values[has] += (data[separators[has] - 1 - digit].astype(np.int64) - 48) * 10**digit
    return values.reshape(-1, 2)


def _check_order(path: str, line: int, numbers: Ints, before: int, num_tokens: int) -> None:
    """Check that each document has a token, begins where the one before ends or later, and lies within the part."""
    start, end = numbers[:, 0], numbers[:, 1]
    earlier = np.concatenate([[before], end[:-1]])
    wrong = (start >= end) | (start < earlier) | (end > num_tokens)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        if end[at] > num_tokens:
            why = f"the part has {num_tokens} tokens"
        elif start[at] >= end[at]:
            why = "it holds no token"
        else:
            why = f"the document before it ends at {int(earlier[at])}: they overlap"
        raise CorpusError(
            f"{path}:{line + at}: {start[at]},{end[at]}, but {why}. The file is damaged, or of another part."
        )


def _parse_pairs(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse uint64 pairs (start, length), in any order, with or without gaps."""
    if len(data) % 16:
        raise CorpusError(
            f"{path}: {len(data)} bytes is not a multiple of 16, the size of a pair (start, length). It was cut short."
        )
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    start, length = pairs[:, 0], pairs[:, 1]
    wrong = (start > num_tokens) | (length > num_tokens - np.minimum(start, np.uint64(num_tokens)))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(
            f"{path}: episode {at} is {length[at]} tokens from token {start[at]} on, but there are {num_tokens} "
            "tokens. The index is damaged, or of other tokens."
        )
    return start.astype(np.int64), length.astype(np.int64)


def _parse_starts(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse int64 starts, ascending from 0, in a .npy file or raw. A last one equal to the number of tokens is the end."""
    offset = 0
    if data.startswith(MAGIC):
        descr, shape, offset = npy_header(path, data, len(data))
        if descr != "<i8" or len(shape) != 1 or shape[0] != (len(data) - offset) / 8:
            raise CorpusError(
                f"{path}: its .npy header says dtype {descr!r} and shape {shape}, before {len(data) - offset} bytes; "
                "expected '<i8', one dimension and 8 bytes a start."
            )
    elif len(data) % 8:
        raise CorpusError(f"{path}: {len(data)} bytes is not a multiple of 8, the size of an int64 start.")
    starts = np.frombuffer(data, "<i8", offset=offset).astype(np.int64)
    if len(starts) and starts[-1] == num_tokens:
        starts = starts[:-1]
    if len(starts) == 0:
        if num_tokens:
            raise CorpusError(f"{path}: lists no document, but there are {num_tokens} tokens.")
        return starts, starts
    ends = np.append(starts[1:], num_tokens)
    wrong = ends <= starts
    if starts[0] != 0 or wrong.any():
        at = int(np.flatnonzero(wrong)[0]) + 1 if starts[0] == 0 else 0
        raise CorpusError(
            f"{path}: start {at} is {starts[at] if at < len(starts) else num_tokens}; expected starts "
            f"that ascend from 0 and stay below {num_tokens}, the number of tokens."
        )
    return starts, ends - starts


def _short(text: bytes) -> str:
    return repr(shortened(text.decode("latin1")))


BOUNDARY_KINDS: dict[BoundaryKind, Callable[[str, bytes, int], tuple[Ints, Ints]]] = {
    "csv": _parse_csv,
    "pairs": _parse_pairs,
    "starts": _parse_starts,
}
"""Parsers of boundary files, by `BoundaryFile.kind`."""
