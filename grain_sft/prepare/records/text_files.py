"""Functions that detect JSONL files, JSON arrays and plain texts, and cut these files into parts of whole records."""

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

from grain_sft.errors import CorpusFileError, PrepareError, RecordError
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.decompression import decompressed
from grain_sft.prepare.records.units import Part, ReadReport

MAX_RECORD = 1 << 28  # most bytes of a record; a longer record is probably a mistake
BOM = b"\xef\xbb\xbf"

# First bytes and names of the kinds of files that are refused if they are compressed.
_ROW_MAGICS = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x83\xaf\x70\xd1": "ArrayRecord"}
_SPACE = b" \t\r\n"
_OBJECT = re.compile(rb'(\[\s*)?\{\s*["}]')  # beginning of an object, or of an array of objects

# `*+` and `++` are possessive: the search does not backtrack.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb'\{(?:[^"{}\[\]]++|' + _STRING + rb")*+\}|" + _STRING + rb'|["\[\]{},]', re.DOTALL)
"""Token of an array: a whole string, a whole object without objects or lists, a bracket, a brace, a comma, or the first quote
of a string that ends in later data. The reading of chats is 3 times as fast with whole objects as tokens.
"""


def kind_and_parts(path: str, size: int, compression: str, min_bytes: int, report: ReadReport) -> tuple[str, Iterator[Part]]:
    """Return the kind of a file ("text", "array" or "jsonl"), and its parts. A part has about `min_bytes` decompressed bytes.

    The file is read while the parts are iterated over. Only its first bytes are read before, to find its kind.
    """
    pieces = decompressed(path, size, compression, report)
    first_pieces: list[bytes] = []
    head = b""
    for data in pieces:
        first_pieces.append(data)
        head = (head + data).removeprefix(BOM).lstrip(_SPACE)
        if len(head) >= 64:  # enough to decide the kind
            break
    kind = _kind_of(path, head)
    parts_of = {"array": _parts_of_array, "jsonl": _parts_of_lines, "text": _part_of_text}[kind]
    return kind, parts_of(path, itertools.chain(first_pieces, pieces), min_bytes)


def _kind_of(path: str, head: bytes) -> str:
    """Return the kind of a file with the first bytes `head`. Refuse compressed Parquet, Arrow and ArrayRecord files.

    A text has the name of a text, and does not begin like a JSON object or an array of objects.
    """
    for magic, name in _ROW_MAGICS.items():
        if head.startswith(magic):
            raise PrepareError(f"{path}: a compressed {name} file can't be read from the middle. Decompress it.")
    if walk.TEXT_NAME.search(path) and not _OBJECT.match(head):
        return "text"
    return "array" if head.startswith(b"[") else "jsonl"


def too_long(where: str, what: str) -> RecordError:
    """Return the error for a record of more than `MAX_RECORD` bytes."""
    return RecordError(f"{where}: a {what} of more than {MAX_RECORD} bytes. Expected at most {MAX_RECORD}. Split it.")


def elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element in a part of an array."""
    start = 0
    for end in itertools.chain(_record_ends(data), [len(data)]):
        yield data[start:end].strip(_SPACE)
        start = end + 1  # after the comma


def _parts_of_lines(path: str, pieces: Iterator[bytes], min_bytes: int) -> Iterator[Part]:
    """Yield the parts of a file of lines. `pieces` has its decompressed bytes, then b""."""
    data = bytearray()  # bytes of the file that are in no part yet, from byte `offset` on
    offset = 0
    line = 1  # number of the first line in `data`
    for piece in pieces:
        data += piece
        end = data.rfind(b"\n", len(data) - len(piece)) + 1  # after the last newline in `piece`; 0 without one
        if end >= min_bytes:
            num_lines = data.count(b"\n", 0, end)
            yield _part(data, end, offset, num_lines)
            offset += end
            line += num_lines
            del data[:end]
        if len(data) > MAX_RECORD + min_bytes:
            line += data.count(b"\n")
            raise too_long(f"{path}:{line}", "line")
    if data:
        yield _part(data, len(data), offset, data.count(b"\n", 0, len(data) - 1) + 1)


def _part_of_text(path: str, pieces: Iterator[bytes], min_bytes: int) -> Iterator[Part]:
    """Yield the only part of a text."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > MAX_RECORD:
            raise too_long(path, "text")
    yield _part(data, len(data), 0, 1)


def _parts_of_array(path: str, pieces: Iterator[bytes], min_bytes: int) -> Iterator[Part]:
    """Yield the parts of an array. Its brackets, and the commas between parts, are in no part."""
    data = bytearray()  # bytes of the file that are in no part yet, from byte `offset` on
    while not (offset := data.find(b"[") + 1):  # offset of the byte after the opening bracket, which `kind_and_parts` has seen
        data += next(pieces)
    del data[:offset]
    total = 0  # records of the parts before `data`
    next_scan = min_bytes  # `data` is scanned when it has this many bytes
    for piece in pieces:
        data += piece
        # the last piece is empty; then all of `data` is scanned
        if piece and len(data) < next_scan:
            continue
        # after the loop, `end` is the index of the last comma between records, or of the closing bracket
        records = end = 0
        for end in _record_ends(data):  # noqa: B007
            records += 1
        if data[end : end + 1] == b"]":
            # "[]" has no record; "[1, ]" has two records, and the second is empty
            if total or data[:end].strip(_SPACE):
                yield _part(data, end, offset, records)
            _check_end(path, itertools.chain([bytes(data[end + 1 :])], pieces), offset + end + 1)
            return
        if records:
            yield _part(data, end, offset, records)
            del data[: end + 1]
            offset += end + 1
            total += records
        if len(data) > MAX_RECORD + min_bytes:
            raise too_long(f"{path}:{total + 1}", "record")
        # A scan for each piece would scan a long unfinished record many times. So the next scan waits until `data` has doubled.
        next_scan = len(data) + max(min_bytes, len(data))
    raise CorpusFileError(f"{path}: an array without its closing bracket after {total} records. Copy the file again.")


def _record_ends(data: bytes | bytearray) -> Iterator[int]:
    """Yield the index of each comma between records, and of the array's closing bracket if `data` has it."""
    depth = 0  # number of open brackets and braces inside a record
    for match in _TOKEN.finditer(data):
        if match.end() - match.start() > 1:  # a whole object or string
            continue
        token = data[match.start()]
        if token == ord('"'):
            return  # the string ends in later data
        if token in b"[{":
            depth += 1
        elif depth and token in b"]}":
            depth -= 1
        elif not depth and token in b",]":
            yield match.start()
            if token == ord("]"):
                return


def _check_end(path: str, pieces: Iterable[bytes], offset: int) -> None:
    """Refuse text after an array, which ends at `offset`."""
    if any(piece.strip(_SPACE) for piece in pieces):
        name, found = shlex.quote(path), f"text follows the end of the array, at byte {offset}. Expected one array in a file"
        fix = f"If each line is a list of messages, make records of them: jq -c '{{messages: .}}' {name} > {name}.jsonl"
        raise CorpusFileError(f"{path}: {found}. {fix}")


def _part(data: bytearray, end: int, offset: int, records: int) -> Part:
    """Return the part `data[:end]`. `data` begins at byte `offset` of the file."""
    return Part(offset, offset + end, records, hashlib.sha256(memoryview(data)[:end]).hexdigest())
