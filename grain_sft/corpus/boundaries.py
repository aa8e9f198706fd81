"""Boundary files: sidecar files of five kinds with the ends of a shard's documents."""

import dataclasses
import functools
import gzip
import io
import re
import zlib
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import megatron_index
from grain_sft.corpus.array_file import header_of, locate_values
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import Count, FileStamp, describe

Ints = npt.NDArray[np.int64]
BoundaryKind = Literal["csv", "pairs", "starts", "preference", "megatron"]
CUTTING_KINDS: tuple[BoundaryKind, ...] = ("csv",)
"""Kinds of boundary files for shards that may cut through documents."""
SEQUENCE_KINDS = {"megatron": megatron_index.parse}
"""Kinds of boundary files that group sequences to documents, and how they are parsed."""

_BLOCK = 1 << 18  # bytes of lines that are parsed at once, while they are in the processor's cache
_LONGEST_LINE = 1 << 16  # bytes of a line behind a block; Dolma's tokenizer writes names and paths of documents, too
_MORE_COLUMNS = re.compile(rb"^(\d+,\d+),[^\n]*", re.MULTILINE)
_PAIR = re.compile(rb"\d{1,18},\d{1,18}")  # 18 digits always fit into int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundaryFile(FileStamp):
    """The document boundaries of one shard, with the attributes of `FileStamp`.

    Attributes:
      kind: "csv" (gzipped lines `start,end`; more columns are ignored), "pairs" (uint64 pairs of start and length),
        "starts" (int64 starts), "preference" (uint64 start, and lengths of prompt, chosen and rejected response) or
        "megatron" (an `.idx` file).
      continues: Whether the shard's first document began in the shard before; None: unknown.
      sequences: Range of the file's sequences that the shard holds; None: all, or the file has none.
    """

    kind: BoundaryKind
    continues: bool | None = None
    sequences: tuple[Count, Count] | None = None

    def parse(self, data: bytes, num_tokens: int, *, by_sequence: bool = False) -> tuple[Ints, Ints]:
        """Return (first token, length) of each document, int64 [documents], counted from the shard's first token.

        With `by_sequence`, return them of each sequence, if the file groups sequences to documents.
        """
        if self.kind in SEQUENCE_KINDS:
            parse = SEQUENCE_KINDS[self.kind]
            return parse(self.path, data, num_tokens, self.sequences, by_sequence=by_sequence)
        return BOUNDARY_KINDS[self.kind](self.path, data, num_tokens)


def describe_boundaries(path: str, kind: BoundaryKind, continues: bool | None = None) -> BoundaryFile:
    """Return the stamp of the present file."""
    return BoundaryFile(**vars(describe(path)), kind=kind, continues=continues)


def _parse_csv(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse lines `start,end`, ascending, with or without gaps.

    Memory is bounded by the number of documents, which can't exceed that of tokens, whatever the file unpacks to.
    """
    if not data:
        raise CorpusError(f"{path}: is empty; expected gzipped lines 'start,end'. It was cut short.")
    parsed, stream = bytearray(), gzip.GzipFile(fileobj=io.BytesIO(data))
    line, before = 1, 0
    while True:
        try:
            lines, rest = stream.read(_BLOCK), stream.readline(_LONGEST_LINE)
        except (OSError, EOFError, zlib.error) as error:
            raise CorpusError(
                f"{path}: can't be unpacked after line {line - 1} ({error}). It is cut short or damaged."
            ) from error
        if not lines:
            break
        if len(rest) == _LONGEST_LINE:
            raise CorpusError(f"{path}:{line + lines.count(10)}: expected 'start,end', found {_shown(rest)}.")
        numbers = _parse_lines(path, line, lines + rest)
        _check_order(path, line, numbers, before, num_tokens)
        before = int(numbers[-1, 1])
        line += len(numbers)
        parsed += numbers.tobytes()
    if not parsed and num_tokens:
        raise CorpusError(f"{path}: lists no document, but the part has {num_tokens} tokens.")
    start, end = np.frombuffer(parsed, np.int64).reshape(-1, 2).T
    end -= start
    return start, end


def _parse_lines(path: str, line: int, lines: bytes) -> Ints:
    """Return int64 [lines, 2] of whole lines, parsed all at once: about 12 ns a byte."""
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    if not lines.endswith(b"\n"):  # the last line of the file
        lines += b"\n"
    if lines.count(b",", 0, lines.index(b"\n")) > 1:  # start,end,id,src,loc
        lines = _MORE_COLUMNS.sub(rb"\1", lines)
    numbers = lines.replace(b"\n", b",")
    separators = lines.translate(None, b"0123456789")
    are_pairs = separators == b",\n" * (len(separators) // 2) and b",," not in numbers and numbers[:1] != b","
    if not are_pairs or (values := np.fromstring(numbers, np.int64, sep=",")).max() >= 10**18:
        found = ((number, text) for number, text in enumerate(lines.split(b"\n"), line) if not _PAIR.fullmatch(text))
        number, text = next(found)
        raise CorpusError(f"{path}:{number}: expected 'start,end' in digits, found {_shown(text)}.")
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
        raise CorpusError(f"{path}:{line + at}: {start[at]},{end[at]}, but {why}. It is damaged, or of another part.")


def _parse_entries(path: str, data: bytes, num_tokens: int, *, columns: int, noun: str) -> tuple[Ints, Ints]:
    """Parse uint64 entries of a start and the lengths of a document's parts, in any order, with or without gaps."""
    size = 8 * columns
    if len(data) % size:
        raise CorpusError(f"{path}: {len(data)} bytes is not a multiple of {size}, one {noun}. It was cut short.")
    entries, limit = np.frombuffer(data, "<u8").reshape(-1, columns), np.uint64(num_tokens)
    start, parts = entries[:, 0], entries[:, 1:]
    length = parts.sum(axis=1, dtype=np.uint64)  # may overflow only where a part is too long
    wrong = (start > limit) | (parts > limit).any(axis=1) | (length > limit - np.minimum(start, limit))
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(
            f"{path}: {noun} {at} is {length[at]} tokens from token {start[at]} on, but there are {num_tokens}. It is damaged."
        )
    return start.astype(np.int64), length.astype(np.int64)


def _parse_starts(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse int64 starts, ascending from 0, in a .npy file or raw. A last one equal to the number of tokens is the end."""
    dtype: np.dtype[Any] = np.dtype("<i8")
    offset = locate_values(path, data, len(data), dtype, header_of(path, ("<i8",), dtype))[2]
    starts = np.frombuffer(data, dtype, offset=offset).astype(np.int64)
    if len(starts) and starts[-1] == num_tokens:
        starts = starts[:-1]
    if len(starts) == 0 and num_tokens:
        raise CorpusError(f"{path}: lists no document, but there are {num_tokens} tokens.")
    bounds = np.append(starts, num_tokens)
    wrong = np.append(bounds[:1] != 0, np.diff(bounds) <= 0)
    if len(starts) and wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(f"{path}: start {at} is {bounds[at]}; expected starts from 0, ascending, below {num_tokens}.")
    return starts, np.diff(bounds)


def _shown(text: bytes) -> str:
    return repr(shortened(text.decode("latin1")))


BOUNDARY_KINDS: dict[BoundaryKind, Callable[[str, bytes, int], tuple[Ints, Ints]]] = {
    "csv": _parse_csv,
    "pairs": functools.partial(_parse_entries, columns=2, noun="episode"),
    "starts": _parse_starts,
    "preference": functools.partial(_parse_entries, columns=4, noun="pair"),
}
"""How boundary files of each kind are parsed: from their path, their bytes and the number of tokens."""
