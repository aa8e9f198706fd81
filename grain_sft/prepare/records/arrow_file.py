"""Arrow IPC files and streams of records, such as those of Hugging Face datasets, read by record batches.

A stream is a sequence of messages: the schema, dictionaries, record batches, and an end-of-stream marker. A file is a stream
between a magic and a footer.

Format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, GrainSftError, import_extra
from grain_sft.prepare.records.scanner import Scanner
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.prepare.records.unpacked import check_digest, read_exactly
from grain_sft.storage import files

_MAGIC = b"ARROW1"
_FILE_HEAD = _MAGIC + b"\0\0"
_CONTINUATION = b"\xff\xff\xff\xff"  # first bytes of a message
_END_OF_STREAM = _CONTINUATION + bytes(4)
_ROWS = 1024  # rows converted at once
_READ = 1 << 23  # bytes read at once


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is an Arrow file, by its first bytes or its name."""
    return head.startswith((_MAGIC, _CONTINUATION)) or path.endswith((".arrow", ".feather"))


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return parts of whole record batches, each of at least `least` bytes except the last, and an empty note.

    A file whose dictionaries change between two batches is one part.
    """
    import_extra("pyarrow", f"{path}: reading Arrow", "pyarrow", "parquet")
    parts, changing = _parts(Scanner(path, size, read), least)
    if changing:
        parts, _ = _parts(Scanner(path, size, read), size)
    return parts, ""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    from pyarrow import ipc, py_buffer

    found = 0
    with errors_named(f"{entry.path}: bytes {unit.start} to {unit.stop}: can't be read as Arrow"):
        head = _head(entry.path, entry.size, (entry.parts or (unit,))[0]) if unit.start else b""
        data = bytearray(head)
        for start in range(unit.start, unit.stop, _READ):  # in pieces, so that a large batch is in memory once
            data += read_exactly(entry.path, entry.size, start, min(start + _READ, unit.stop))
        check_digest(entry.path, memoryview(data)[len(head) :], unit.digest)
        for batch in ipc.open_stream(py_buffer(data).slice(len(_FILE_HEAD) if data.startswith(_MAGIC) else 0)):
            batch.validate(full=True)
            found += batch.num_rows
            yield from rows_of(batch)
    if found != unit.records:
        raise CorpusFileError(f"{entry.path}: has {found} rows, expected {unit.records}. It changed while it was read.")


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Raise errors of pyarrow and of Python's conversions as a CorpusFileError that begins with `what`."""
    from pyarrow import ArrowException

    try:
        yield
    except GrainSftError:
        raise
    except (ArrowException, OSError, ValueError, OverflowError) as error:  # OverflowError: a date after the year 9999
        raise CorpusFileError(f"{what} ({error}). Write the file again.") from error


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as JSON values, without the keys whose value is None: columns have no absent keys."""
    if len(set(batch.schema.names)) < batch.num_columns:
        raise ValueError("two columns have the same name")
    for start in range(0, batch.num_rows, _ROWS):
        for row in batch.slice(start, _ROWS).to_pylist():
            yield _without_none(row)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


class _Stream(io.RawIOBase):
    """The stream of a file, for pyarrow: from the schema to the end-of-stream marker."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self.is_file = files.read_range(scanner.path, 0, min(scanner.size, 8)) == _FILE_HEAD
        if self.is_file:
            scanner.skip(len(_FILE_HEAD))

    def readable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        return self._scanner.take(min(count, self._scanner.size - self._scanner.position))


def _parts(scanner: Scanner, least: int) -> tuple[tuple[Part, ...], bool]:
    """Return the parts of a file, and whether a dictionary follows a record batch."""
    from pyarrow import ArrowException, PythonFile, ipc

    path, size, stream = scanner.path, scanner.size, _Stream(scanner)
    parts: list[Part] = []
    begin = start = rows = batches = dictionaries = 0
    try:
        reader = ipc.open_stream(PythonFile(stream, "r"))
        start = scanner.position
        for batch in reader:
            start = scanner.position
            dictionaries = dictionaries or reader.stats.num_dictionary_batches
            rows, batches = rows + batch.num_rows, batches + 1
            if start - begin >= least:
                parts.append(scanner.part(rows))
                begin, rows, batches = start, 0, 0
    except GrainSftError:
        raise
    except (ArrowException, OSError, ValueError) as error:
        raise CorpusFileError(
            f"{path}: byte {start}: not a message of Arrow. Is the file damaged? Write it again."
        ) from error
    stop = end = scanner.position
    if read_exactly(path, size, start, stop) != _END_OF_STREAM:
        raise CorpusFileError(f"{path}: ends without Arrow's end-of-stream marker. Is it cut short? Copy it again.")
    if stream.is_file:  # the footer, its length in 4 bytes, and the magic
        tail = files.read_range(path, max(stop, size - len(_MAGIC) - 4), size)
        end = stop + int.from_bytes(tail[:4], "little") + len(tail) if tail[4:] == _MAGIC else 0
    if end != size:
        raise CorpusFileError(f"{path}: byte {stop}: not a message of Arrow. Is the file damaged? Write it again.")
    if batches:
        parts.append(scanner.part(rows))
    return tuple(parts), reader.stats.num_dictionary_batches != dictionaries


@functools.lru_cache(16)
def _head(path: str, size: int, first: Part) -> bytes:
    """Return the schema and the dictionaries of a file. Its first part is a key of the cache, for a file that is replaced."""
    from pyarrow import PythonFile, ipc

    scanner, stop = Scanner(path, size), 0
    messages = ipc.MessageReader.open_stream(PythonFile(_Stream(scanner), "r"))
    while messages.read_next_message().type != "record batch":
        stop = scanner.position
    return read_exactly(path, size, 0, stop).removeprefix(_FILE_HEAD)
