"""Boundary files: where documents begin and end in one shard, in the three ways that formats say it."""

from __future__ import annotations

import dataclasses
import gzip
import io
import re
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import MAGIC, describe, npy_header, read_whole

Ints = npt.NDArray[np.int64]

_BLOCK = 1 << 22  # bytes of lines parsed at once
_LONGEST_LINE = 1 << 16  # with the names and paths of documents that Dolma's tokenizer writes
_MORE_COLUMNS = re.compile(rb"^(\d+,\d+),[^\n]*", re.MULTILINE)
_DIGITS = 18  # of a number that int64 surely holds


@dataclasses.dataclass(frozen=True)
class BoundaryFile:
    """The document boundaries of one shard.

    Attributes:
      path: local path, or URL.
      kind: "csv" (gzipped lines `start,end`; more columns are ignored), "pairs" (uint64 pairs of start and length) or
        "starts" (int64 starts).
      size: bytes of the file.
      digest: hash of its first and last 4 KiB.
      continues: whether the shard's first document began in the shard before; None: not known.
      version: version of a remote file; None: not known.
      root: folder that the file has to lie in whenever it is opened; None: it may lie anywhere. Not saved.
    """

    path: str
    kind: str
    size: int
    digest: str
    continues: bool | None = None
    version: str | None = dataclasses.field(default=None, compare=False)
    root: str | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def data_offset(self) -> int:
        """Bytes before its data: none."""
        return 0


def describe_boundaries(path: str, kind: str, continues: bool | None = None) -> BoundaryFile:
    """The file as it is now.

    Raises:
      CorpusFileError: missing or unreadable.
    """
    stored = describe(path)
    return BoundaryFile(path, kind, stored.size, stored.digest, continues, stored.version)


def read_boundaries(file: BoundaryFile, num_tokens: int) -> tuple[Ints, Ints]:
    """(first token, tokens) of each document, int64 [documents], counted from the shard's first token.

    Raises:
      CorpusFileError: the file is missing, or not the one that was described.
      CorpusError: it is damaged, or says what can't be of a shard of so many tokens.
    """
    return parse_boundaries(file, read_whole(file), num_tokens)


def parse_boundaries(file: BoundaryFile, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """As `read_boundaries`, from the bytes of the file."""
    return READERS[file.kind](file, data, num_tokens)


def _read_csv(file: BoundaryFile, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Lines `start,end`, ascending, with or without gaps; more columns are ignored, as OLMo-core ignores them.

    Memory is bounded by the documents, which can't be more than tokens, whatever the file unpacks to.
    """
    starts, ends = [], []
    line, before = 1, 0
    if not data:
        raise CorpusError(f"{file.path}: is empty; expected gzipped lines 'start,end'. It was cut short.")
    stream = gzip.GzipFile(fileobj=io.BytesIO(data))
    rest = b""
    while True:
        try:
            block = stream.read(_BLOCK)
        except (OSError, EOFError, zlib.error) as error:
            raise CorpusError(
                f"{file.path}: can't be unpacked after line {line - 1} ({error}). It is cut short or damaged."
            ) from error
        cut = block.rfind(b"\n") + 1 if block else 0
        lines, rest = (rest + block[:cut], block[cut:]) if cut else (b"", rest + block)
        if not block:
            lines, rest = (rest + b"\n" if rest else b""), b""
        if len(rest) > _LONGEST_LINE:
            raise CorpusError(f"{file.path}:{line + lines.count(10)}: expected 'start,end', found {_short(rest)}.")
        if lines:
            numbers = _parse(file.path, line, lines)
            _check_order(file.path, line, numbers, before, num_tokens)
            before = int(numbers[-1, 1])
            line += len(numbers)
            starts.append(numbers[:, 0])
            ends.append(numbers[:, 1])
        if not block:
            break
    if not starts and num_tokens:
        raise CorpusError(f"{file.path}: lists no document, but the part has {num_tokens} tokens.")
    start = np.concatenate([np.empty(0, np.int64), *starts])
    return start, np.concatenate([np.empty(0, np.int64), *ends]) - start


def _parse(path: str, line: int, lines: bytes) -> Ints:
    """int64 [lines, 2] of whole lines; all at once: some 20 ns a byte."""
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
    for digit in range(int(widths.max())):  # from the last on
        has = widths > digit
        values[has] += (data[separators[has] - 1 - digit].astype(np.int64) - 48) * 10**digit
    return values.reshape(-1, 2)


def _check_order(path: str, line: int, numbers: Ints, before: int, num_tokens: int) -> None:
    """Each document has a token, begins where the one before ends or later, and lies within the part."""
    start, end = numbers[:, 0], numbers[:, 1]
    earlier = np.concatenate([[before], end[:-1]])
    wrong = (start >= end) | (start < earlier) | (end > num_tokens)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        found, last = f"{start[at]},{end[at]}", int(earlier[at])
        if end[at] > num_tokens:
            why = f"the part has {num_tokens} tokens"
        else:
            why = (
                "it holds no token" if start[at] >= end[at] else f"the document before it ends at {last}: they overlap"
            )
        raise CorpusError(f"{path}:{line + at}: {found}, but {why}. The file is damaged, or of another part.")


def _read_pairs(file: BoundaryFile, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """uint64 pairs (start, length), in any order, with or without gaps."""
    if len(data) % 16:
        raise CorpusError(
            f"{file.path}: {len(data)} bytes is no multiple of 16, the size of a pair (start, length). It was cut short."
        )
    pairs = np.frombuffer(data, "<u8").reshape(-1, 2)
    start, length = pairs[:, 0], pairs[:, 1]
    wrong = (start > num_tokens) | (length > num_tokens - np.minimum(start, np.uint64(num_tokens)))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(
            f"{file.path}: episode {at} is {length[at]} tokens from token {start[at]} on, but there are {num_tokens} "
            "tokens. The index is damaged, or of other tokens."
        )
    return start.astype(np.int64), length.astype(np.int64)


def _read_starts(file: BoundaryFile, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """int64 starts, ascending from 0, in a .npy file or raw; a last one that is the number of tokens is the end."""
    offset = 0
    if data.startswith(MAGIC):
        descr, shape, offset = npy_header(file.path, data, len(data))
        if descr != "<i8" or len(shape) != 1 or shape[0] != (len(data) - offset) / 8:
            raise CorpusError(
                f"{file.path}: its .npy header says dtype {descr!r} and shape {shape}, before {len(data) - offset} bytes; "
                "expected '<i8', one dimension and 8 bytes a start."
            )
    elif len(data) % 8:
        raise CorpusError(f"{file.path}: {len(data)} bytes is no multiple of 8, the size of an int64 start.")
    starts = np.frombuffer(data, "<i8", offset=offset).astype(np.int64)
    if len(starts) and starts[-1] == num_tokens:
        starts = starts[:-1]
    if len(starts) == 0:
        if num_tokens:
            raise CorpusError(f"{file.path}: lists no document, but there are {num_tokens} tokens.")
        return starts, starts
    ends = np.append(starts[1:], num_tokens)
    wrong = ends <= starts
    if starts[0] != 0 or wrong.any():
        at = int(np.flatnonzero(wrong)[0]) if starts[0] == 0 else -1
        raise CorpusError(
            f"{file.path}: start {at + 1} is {starts[at + 1] if at + 1 < len(starts) else num_tokens}; expected starts "
            f"that ascend from 0 and stay below {num_tokens}, the number of tokens."
        )
    return starts, ends - starts


def _short(text: bytes) -> str:
    return repr(shortened(text.decode("latin1")))


READERS: dict[str, Callable[[BoundaryFile, bytes, int], tuple[Ints, Ints]]] = {
    "csv": _read_csv,
    "pairs": _read_pairs,
    "starts": _read_starts,
}
