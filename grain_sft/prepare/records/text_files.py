"""Detection of JSONL files, JSON arrays and plain texts, and cutting of these files into parts of whole records."""

import hashlib
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

from grain_sft.errors import CorpusFileError, PrepareError, RecordError
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.decompression import decompressed
from grain_sft.prepare.records.units import Part, ReadReport

MAX_RECORD = 1 << 28  # most bytes of a record; a longer record is a mistake
BOM = b"\xef\xbb\xbf"

# First bytes of the files that can't be read once they are compressed.
_ROW_FILES = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x83\xaf\x70\xd1": "ArrayRecord"}
_SPACE = b" \t\r\n"
_HEAD = 64  # bytes that decide the kind of a file
_OBJECT = re.compile(rb'(\[\s*)?\{\s*["}]')  # beginning of an object, or of an array of objects

# The possessive quantifiers (`*+`) of both patterns keep the search from trying a text twice.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb'\{(?:[^"{}\[\]]++|' + _STRING + rb")*+\}|" + _STRING + rb'|["\[\]{},]', re.DOTALL)
"""Pattern of what `_record_ends` checks in an array: a whole string, a whole object without objects or lists, a bracket, a
brace, a comma, or the quote of a string that ends in later data. Arrays of chats are read 3 times as fast because whole objects
match."""


def kind_of(path: str, size: int, compression: str) -> str:
    """Return the kind of a file: "text", "array" or "jsonl". Refuse compressed Parquet, Arrow and ArrayRecord files.

    A file is a text if `walk.is_text` accepts its name and it does not begin like a JSON object or an array of objects. It is
    an array if its first character that is not blank is "[". All others are JSONL.
    """
    head = b""
    for data in decompressed(path, size, compression):
        head = (head + data).removeprefix(BOM).lstrip(_SPACE)
        if len(head) >= _HEAD:
            break
    for magic, name in _ROW_FILES.items():
        if head.startswith(magic):
            raise PrepareError(f"{path}: a compressed {name} file can't be read from the middle. Decompress it.")
    if walk.is_text(path) and not _OBJECT.match(head):
        return "text"
    return "array" if head.startswith(b"[") else "jsonl"


def parts_of(path: str, size: int, compression: str, kind: str, least: int, read: ReadReport) -> Iterator[Part]:
    """Yield the parts of a file. A part has about `least` decompressed bytes, but a text is one part."""
    data = decompressed(path, size, compression, read)
    return {"array": _parts_of_array, "jsonl": _parts_of_lines, "text": _part_of_text}[kind](path, data, least)


def too_long(where: str, what: str) -> RecordError:
    """Return the error for a record of more than `MAX_RECORD` bytes."""
    return RecordError(f"{where}: a {what} of more than {MAX_RECORD} bytes; expected at most that. Split it.")


def elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element in a part of an array."""
    start = 0
    for end in itertools.chain(_record_ends(data), [len(data)]):
        yield data[start:end].strip(_SPACE)
        start = end + 1  # after the comma


def _parts_of_lines(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the parts of a file of lines. A part has whole lines."""
    data = bytearray()  # bytes of the file that are in no part yet, from byte `offset` on
    offset = 0
    line = 1  # number of the first line in `data`
    for piece in pieces:
        data += piece
        end = data.rfind(b"\n", len(data) - len(piece)) + 1  # after the last newline of `piece`, else 0
        if end >= least:
            num_lines = data.count(b"\n", 0, end)
            yield _part(data, end, offset, num_lines)
            offset += end
            line += num_lines
            del data[:end]
        if len(data) > MAX_RECORD + least:
            line += data.count(b"\n")
            raise too_long(f"{path}:{line}", "line")
    if data:
        num_lines = data.count(b"\n") + (0 if data.endswith(b"\n") else 1)
        yield _part(data, len(data), offset, num_lines)


def _part_of_text(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the whole text as one part."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > MAX_RECORD:
            raise too_long(path, "text")
    yield _part(data, len(data), 0, 1)


def _parts_of_array(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the parts of an array. Its brackets, and the commas between parts, are in no part."""
    data = bytearray()  # bytes of the file that are in no part yet, from byte `offset` on
    while not (offset := data.find(b"[") + 1):  # the array begins at byte `offset`, after its opening bracket
        data += next(pieces)
    del data[:offset]
    total = 0  # records of the parts before `data`
    next_scan = least  # `data` is scanned when it has this many bytes
    for piece in pieces:
        data += piece
        if piece and len(data) < next_scan:  # the empty piece at the end starts the last scan
            continue
        # after the loop, `end` is the index of the last comma between records, or of the closing bracket
        records = end = 0
        for end in _record_ends(data):  # noqa: B007
            records += 1
        if data[end : end + 1] == b"]":
            # In "[]" there is no record. In "[1, ]", the blank after the comma is a record: an empty element.
            if total or data[:end].strip(_SPACE):
                yield _part(data, end, offset, records)
            _check_end(path, itertools.chain([bytes(data[end + 1 :])], pieces), offset + end + 1)
            return
        if records:
            yield _part(data, end, offset, records)
            del data[: end + 1]
            offset += end + 1
            total += records
        if len(data) > MAX_RECORD + least:
            raise too_long(f"{path}:{total + 1}", "record")
        # a scan begins at the unfinished record; a long record is scanned again when `data` has doubled, not for each piece
        next_scan = len(data) + max(least, len(data))
    raise CorpusFileError(f"{path}: an array without its closing bracket after {total} records. Copy the file again.")


def _record_ends(data: bytes | bytearray) -> Iterator[int]:
    """Yield the index of each comma between records of an array, and of its closing bracket if that is in `data`."""
    depth = 0  # open brackets and braces of a record
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
        name = shlex.quote(path)
        raise CorpusFileError(
            f"{path}: text follows the end of the array, at byte {offset}. Expected one array in a file. If each line is a "
            f"list of messages, make records of them: jq -c '{{messages: .}}' {name} > {name}.jsonl"
        )


def _part(data: bytearray, end: int, offset: int, records: int) -> Part:
    """Return the part `data[:end]`. `data` begins at byte `offset` of the file."""
    return Part(offset, offset + end, records, hashlib.sha256(memoryview(data)[:end]).hexdigest())
