"""Boundary files: sidecar files that state where the documents of a shard begin and end."""

import dataclasses
import functools
import gzip
import io
import re
import zlib
from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np

from grain_sft.arguments import check_choice
from grain_sft.corpus import megatron_index
from grain_sft.corpus.array_file import find_data, first_true
from grain_sft.errors import CorpusError, shortened
from grain_sft.storage import Count, FileStamp, describe
from grain_sft.types import Ints

BoundaryKind = Literal["csv", "pairs", "starts", "preference", "megatron"]
CUTTING_KINDS: tuple[BoundaryKind, ...] = ("csv",)
"""Kinds of boundary files whose shards may begin or end in the middle of a document."""

_BLOCK = 1 << 18  # bytes that are parsed at once, few enough for the processor's cache
_LONGEST_LINE = 1 << 16  # bytes; lines of Dolma's tokenizer also hold a document's path
_MORE_COLUMNS = re.compile(rb"^(\d+,\d+),[^\n]*", re.MULTILINE)  # group 1: the first two columns of a line
_PAIR = re.compile(rb"\d{1,18},\d{1,18}")  # 18 digits always fit into int64


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundaryFile(FileStamp):
    """The document boundaries of one shard, with the attributes of `FileStamp`.

    Attributes:
      kind: Format of the file.
        - "csv": gzipped lines `start,end`. More columns are ignored.
        - "pairs": uint64 [documents, 2]. The columns are start and length.
        - "starts": int64 [documents], start of each document. Each document ends where the next begins.
        - "preference": uint64 [documents, 4]. The columns are start, length of the prompt, and lengths of the two responses.
        - "megatron": an `.idx` file. It lists sequences of tokens, and which sequences make each document.
      continues: Whether the shard's first document began in the shard before it; None if unknown.
      sequences: For "megatron", the range of sequences that the shard holds: (0, 9) for sequences 0 to 8; None for all.
    """

    kind: BoundaryKind
    continues: bool | None = None
    sequences: tuple[Count, Count] | None = None

    def parse(self, data: bytes, num_tokens: int, *, by_sequence: bool = False) -> tuple[Ints, Ints]:
        """Return the start and the length of each document: two arrays, int64 [documents].

        The start is the token offset of the first token in the shard. With `by_sequence`, a file that groups sequences into
        documents gives its sequences instead: int64 [sequences].
        """
        if self.groups_sequences:
            return megatron_index.parse(self.path, data, num_tokens, self.sequences, by_sequence=by_sequence)
        return _PARSERS[self.kind](self.path, data, num_tokens)

    @property
    def groups_sequences(self) -> bool:
        """Whether each document is a group of sequences, as in Megatron's files."""
        return self.kind == "megatron"


def describe_boundaries(path: str, kind: BoundaryKind, continues: bool | None = None) -> BoundaryFile:
    """Return the boundary file at `path`."""
    check_choice(f"{path}: boundaries_kind", kind, get_args(BoundaryKind), CorpusError)
    return BoundaryFile(**vars(describe(path)), kind=kind, continues=continues)


def _parse_csv(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse gzipped lines `start,end`, ascending, with or without gaps.

    The file is unpacked block by block, and each block is checked. So a damaged file can't fill the memory, even if it unpacks
    to many GB.
    """
    stream = gzip.GzipFile(fileobj=io.BytesIO(data))
    parsed = bytearray()
    line, previous_end = 1, 0
    while True:
        try:
            block = stream.read(_BLOCK)
            end_of_line = stream.readline(_LONGEST_LINE)  # the rest of the line in which the block ends
        except (OSError, EOFError, zlib.error) as error:
            problem = f"{path}: is cut short or damaged after line {line - 1} ({error})"
            raise CorpusError(f"{problem}. Copy the file again.") from error
        if not block:
            break
        if len(end_of_line) == _LONGEST_LINE:  # no newline within `_LONGEST_LINE` bytes
            last_line = line + block.count(b"\n")
            raise CorpusError(f"{path}:{last_line}: expected 'start,end', found {_quoted(end_of_line)}. Fix the line.")
        numbers = _parse_lines(path, line, block + end_of_line)
        _check_order(path, line, numbers, previous_end, num_tokens)
        previous_end = int(numbers[-1, 1])
        line += len(numbers)
        parsed += numbers.tobytes()
    if not parsed and num_tokens:
        raise CorpusError(f"{path}: lists no document, but the shard has {num_tokens} tokens. Copy the file again.")
    start, end = np.frombuffer(parsed, np.int64).reshape(-1, 2).T
    length = np.subtract(end, start, out=end)  # in place: there may be many millions
    return start, length


def _parse_lines(path: str, line: int, lines: bytes) -> Ints:
    """Return the numbers in `lines`, int64 [lines, 2], at about 12 ns a byte. `line` is the number of the first line."""
    if b"\r" in lines:
        lines = lines.replace(b"\r\n", b"\n")
    if not lines.endswith(b"\n"):
        lines += b"\n"
    if lines.count(b",", 0, lines.index(b"\n")) > 1:  # more columns, such as start,end,id,src,loc
        lines = _MORE_COLUMNS.sub(rb"\1", lines)
    fields = lines.replace(b"\n", b",")  # b"0,5\n5,9\n" becomes b"0,5,5,9,"
    separators = lines.translate(None, b"0123456789")  # b",\n,\n" for two lines of two numbers
    has_two_fields = separators == b",\n" * (len(separators) // 2)
    has_empty_field = b",," in fields or fields.startswith(b",")
    if has_two_fields and not has_empty_field:
        values = np.fromstring(fields, np.int64, sep=",")
        if values.max() < 10**18:  # a number that int64 can't hold is read as the maximum of int64
            return values.reshape(-1, 2)
    texts = lines.split(b"\n")
    wrong = next(i for i, text in enumerate(texts) if not _PAIR.fullmatch(text))
    raise CorpusError(f"{path}:{line + wrong}: expected 'start,end' in digits, found {_quoted(texts[wrong])}. Fix it.")


def _check_order(path: str, line: int, numbers: Ints, previous_end: int, num_tokens: int) -> None:
    """Check that documents from line `line` on are not empty, don't overlap, and lie in `previous_end` to `num_tokens`."""
    start, end = numbers.T
    previous_ends = np.concatenate([[previous_end], end[:-1]])
    i = first_true((start >= end) | (start < previous_ends) | (end > num_tokens))
    if i is not None:
        problem = f"{path}:{line + i}: {start[i]},{end[i]} is empty, overlaps the document before, or leaves the shard"
        expected = f"expected {previous_ends[i]} <= start < end <= {num_tokens}"
        raise CorpusError(f"{problem}; {expected}. Copy the file again, from the same corpus.")


def _parse_entries(path: str, data: bytes, num_tokens: int, *, columns: int, noun: str) -> tuple[Ints, Ints]:
    """Parse uint64 [documents, columns]. The documents are in any order, with or without gaps.

    Column 0 is the document's start, a token offset in the shard. The other columns are the lengths of its parts. `noun` is the
    name of a document in messages.
    """
    size = 8 * columns
    if len(data) % size:
        raise CorpusError(f"{path}: {len(data)} bytes is not a multiple of {size}, one {noun}. Copy the file again.")
    entries = np.frombuffer(data, "<u8").reshape(-1, columns)
    start, part_lengths = entries[:, 0], entries[:, 1:]
    # A sum may overflow. Then a part is above `limit`, so the check below refuses the entry.
    length = part_lengths.sum(axis=1, dtype=np.uint64)
    limit = np.uint64(num_tokens)
    longest = limit - np.minimum(start, limit)  # tokens from `start` to the end of the shard
    i = first_true((start > limit) | (part_lengths > limit).any(axis=1) | (length > longest))
    if i is not None:
        found = f"{noun} {i} begins at token {start[i]} and has {length[i]} tokens"
        raise CorpusError(f"{path}: damaged: {found}, but its shard has {num_tokens}. Copy the file again.")
    return start.astype(np.int64), length.astype(np.int64)


def _parse_starts(path: str, data: bytes, num_tokens: int) -> tuple[Ints, Ints]:
    """Parse int64 starts of documents without gaps, ascending from 0, in a .npy file or a raw file."""
    dtype: np.dtype[Any] = np.dtype("<i8")
    _, _, offset = find_data(path, data, len(data), dtype)
    starts = np.frombuffer(data, dtype, offset=offset).astype(np.int64)
    if len(starts) and starts[-1] == num_tokens:  # some files also list the end of the last document
        starts = starts[:-1]
    if len(starts) == 0 and num_tokens:
        raise CorpusError(f"{path}: lists no document, but its shard has {num_tokens} tokens. Copy the file again.")
    bounds = np.append(starts, num_tokens)
    wrong = np.append(bounds[:1] != 0, np.diff(bounds) <= 0)
    if len(starts) and wrong.any():
        i = min(int(np.flatnonzero(wrong)[0]), len(starts) - 1)  # the last bound is `num_tokens`, not a start
        expected = f"expected starts from 0, ascending, below {num_tokens}"
        raise CorpusError(f"{path}: start {i} is {bounds[i]}; {expected}. Copy the file again, from the same corpus.")
    return starts, np.diff(bounds)


def _quoted(text: bytes) -> str:
    return repr(shortened(text.decode("latin1")))


_PARSERS: dict[BoundaryKind, Callable[[str, bytes, int], tuple[Ints, Ints]]] = {
    "csv": _parse_csv,
    "pairs": functools.partial(_parse_entries, columns=2, noun="document"),
    "starts": _parse_starts,
    "preference": functools.partial(_parse_entries, columns=4, noun="pair"),
}
"""Parsers by kind: functions of the file's path, its bytes and the shard's number of tokens."""
