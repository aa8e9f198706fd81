"""Arrow IPC files and streams of records, such as those of Hugging Face datasets, read by record batches.

Both are a sequence of messages: the schema, dictionaries, record batches, and a mark of the end. A file has them between a
magic and a footer. Format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.scanner import Scanner
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.prepare.records.unpacked import check_digest, read_exactly
from grain_sft.storage import files

_FILE = b"ARROW1"  # at the end of a file
_FILE_HEAD = _FILE + b"\0\0"
_MESSAGE = b"\xff\xff\xff\xff"  # at the beginning of each message
_END = _MESSAGE + bytes(4)
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # types of messages
_ROWS = 1024  # of a batch, converted at once
_READ = 1 << 23  # bytes


class _Message(NamedTuple):
    """Type of a message, offset of its first byte, and of a record batch the number of rows."""

    type: int
    start: int
    rows: int


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is an Arrow file, by its first bytes and its name."""
    return head.startswith((_FILE, _MESSAGE)) or path.endswith((".arrow", ".feather"))


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return parts of whole record batches, each of at least `least` bytes but the last; and no note.

    A file whose dictionaries change between two batches is one part.
    """
    import_extra("pyarrow", f"{path}: reading Arrow", "pyarrow", "parquet")
    parts, changing = _parts(Scanner(path, size, read), least)
    if changing:
        parts, _ = _parts(Scanner(path, size, read), size)
    return parts, ""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    from pyarrow import ArrowException, ipc, py_buffer

    head = _head(entry.path, entry.size) if unit.start else b""
    data = bytearray(head)
    for start in range(unit.start, unit.stop, _READ):  # a batch may be large, and is in memory once
        data += read_exactly(entry.path, entry.size, start, min(start + _READ, unit.stop))
    check_digest(entry.path, memoryview(data)[len(head) :], unit.digest)
    found = 0
    try:
        for batch in ipc.open_stream(py_buffer(data).slice(len(_FILE_HEAD) if data.startswith(_FILE) else 0)):
            batch.validate(full=True)
            found += batch.num_rows
            yield from rows_of(batch)
    except (ArrowException, OSError, ValueError) as error:
        where = f"{entry.path}: bytes {unit.start} to {unit.stop}"
        raise CorpusFileError(f"{where}: can't be read as Arrow ({error}). Write the file again.") from error
    if found != unit.records:
        raise CorpusFileError(f"{entry.path}: has {found} rows, expected {unit.records}. It changed while it was read.")


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch in JSON's types, without the None that columns hold for absent keys."""
    for start in range(0, batch.num_rows, _ROWS):
        for row in batch.slice(start, _ROWS).to_pylist():
            yield _without_none(row)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


def _parts(scanner: Scanner, least: int) -> tuple[tuple[Part, ...], bool]:
    """Return the parts of a file, and whether a dictionary follows a record batch."""
    parts: list[Part] = []
    begin = rows = batches = 0
    changing = False
    for message in _messages(scanner):
        changing |= message.type == _DICTIONARY and bool(parts or batches)
        rows += message.rows
        batches += message.type == _BATCH
        if batches and scanner.position - begin >= least:
            parts.append(scanner.part(rows))
            begin, rows, batches = scanner.position, 0, 0
    return (*parts, *([scanner.part(rows)] if batches else [])), changing


def _messages(scanner: Scanner) -> Iterator[_Message]:
    """Yield each message of a file or a stream when it is passed, from the schema up to the mark of the end."""
    path, size = scanner.path, scanner.size
    expected: tuple[int, ...] = (_SCHEMA,)
    found = scanner.take(8)
    is_file = found == _FILE_HEAD
    if is_file:
        found = scanner.take(8)
    while found != _END:
        start, length = scanner.position - 8, int.from_bytes(found[4:], "little", signed=True)
        if found[:4] != _MESSAGE or not 0 < length <= size - scanner.position:
            raise _damaged(path, start)
        try:
            kind, body, rows = _parsed(scanner.take(length))
        except struct.error:
            raise _damaged(path, start) from None
        if kind not in expected or not 0 <= body <= size - scanner.position or rows < 0:
            raise _damaged(path, start)
        scanner.skip(body)
        yield _Message(kind, start, rows)
        expected = (_DICTIONARY, _BATCH)
        if scanner.position == size:
            raise CorpusFileError(f"{path}: ends without Arrow's mark of the end. Is it cut short? Copy it again.")
        found = scanner.take(8)
    stop, end = scanner.position, size
    if is_file:  # its footer, the length of that, and the magic again
        tail = files.read_range(path, max(stop, size - len(_FILE) - 4), size)
        end = size - len(tail) - int.from_bytes(tail[:4], "little") if tail[4:] == _FILE else 0
    if expected[0] == _SCHEMA or stop != end:
        raise _damaged(path, stop)


def _parsed(metadata: bytes) -> tuple[int, int, int]:
    """Return type, bytes of the body and number of rows of a message, which is a flatbuffer."""
    (message,) = struct.unpack_from("<I", metadata)
    kind, header, body = (_field(metadata, message, *field) for field in ((1, "<B"), (2, "<I"), (3, "<q")))
    if kind != _BATCH:
        return kind, body, 0
    at = message + _offset(metadata, message, 2)
    return kind, body, _field(metadata, at + header, 0, "<q")


def _field(data: bytes, table: int, number: int, format: str) -> int:
    """Return a field of a flatbuffer's table; 0 where it is absent."""
    offset = _offset(data, table, number)
    value: int = struct.unpack_from(format, data, table + offset)[0] if offset else 0
    return value


def _offset(data: bytes, table: int, number: int) -> int:
    """Return the offset of a field in a flatbuffer's table; 0 where it is absent."""
    fields = table - int(struct.unpack_from("<i", data, table)[0])
    (size,) = struct.unpack_from("<H", data, fields)
    place = 4 + 2 * number
    return int(struct.unpack_from("<H", data, fields + place)[0]) if place < size else 0


@functools.lru_cache(16)
def _head(path: str, size: int) -> bytes:
    """Return the messages before the first record batch: the schema and the dictionaries."""
    stop = next((message.start for message in _messages(Scanner(path, size)) if message.type == _BATCH), 0)
    return read_exactly(path, size, 0, stop).removeprefix(_FILE_HEAD)


def _damaged(path: str, byte: int) -> CorpusFileError:
    return CorpusFileError(f"{path}: byte {byte}: not a message of Arrow. Is the file damaged? Write it again.")
