"""Reader of Arrow IPC files and streams, such as those of Hugging Face datasets, in parts of whole record batches.

A stream has the schema, dictionaries, record batches, and an end-of-stream marker. A file has the magic bytes "ARROW1", a
stream, and a footer.
Format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

import contextlib
import io
from collections.abc import Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, GrainSftError, import_extra
from grain_sft.prepare.records.units import Input, Part, ReadReport, Scanner, Unit, check_digest, damaged, read_exactly
from grain_sft.storage import files

_MAGIC = b"ARROW1"
_FILE_HEAD = _MAGIC + b"\0\0"  # a file pads its first magic to 8 bytes
_CONTINUATION = b"\xff\xff\xff\xff"  # first bytes of a message
_END_OF_STREAM = _CONTINUATION + bytes(4)  # a message of length 0
_ROWS = 1024  # rows converted at once
_READ = 1 << 23  # bytes read at once


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is an Arrow file, by its first bytes or its name."""
    return head.startswith((_MAGIC, _CONTINUATION)) or path.endswith((".arrow", ".feather"))


def describe(path: str, size: int, min_bytes: int, report: ReadReport) -> tuple[tuple[Part, ...], str]:
    """Return the pair of a file's parts, and the number of bytes before its first record batch, as text.

    The text is "" if the only part begins at byte 0, and so has these bytes itself. See `inputs.ROW_FILES`.
    """
    import_extra("pyarrow", f"{path}: reading Arrow", "pyarrow", "parquet")
    parts, dictionaries_change = _parts(Scanner(path, size, min_bytes, report))
    if parts and dictionaries_change:  # `rows` reads a part with the first dictionaries only, so the file is one part
        parts = [Part(0, parts[-1].stop, sum(part.records for part in parts))]
    return tuple(parts), str(_head_size(path, size)) if parts and parts[-1].start else ""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    from pyarrow import ipc, py_buffer

    with errors_named(f"{entry.path}: bytes {unit.start} to {unit.stop}: can't be read as Arrow"):
        # the schema and the dictionaries, without the magic of an Arrow file; a unit from byte 0 on has them itself
        head = read_exactly(entry.path, entry.size, 0, int(entry.note)).removeprefix(_FILE_HEAD) if unit.start else b""
        data = bytearray(head)
        # reading all bytes in one call would hold a large batch in memory twice
        for start in range(unit.start, unit.stop, _READ):
            data += read_exactly(entry.path, entry.size, start, min(start + _READ, unit.stop))
        check_digest(entry.path, memoryview(data)[len(head) :], unit.digest)
        stream_start = len(_FILE_HEAD) if data.startswith(_MAGIC) else 0  # a unit from byte 0 on has the magic
        for batch in ipc.open_stream(py_buffer(data).slice(stream_start)):
            batch.validate(full=True)
            yield from rows_of(batch)


@contextlib.contextmanager
def errors_named(what: str) -> Iterator[None]:
    """Raise errors of pyarrow and of conversions to Python as a CorpusFileError that begins with `what`."""
    from pyarrow import ArrowException

    try:
        yield
    except GrainSftError:
        raise
    # OverflowError: a date after the year 9999; KeyError: an unknown time zone
    except (ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        raise CorpusFileError(f"{what} ({error}). Write the file again.") from error


def rows_of(batch: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch as dicts. A null in the batch means that the key is absent, so it is left out."""
    if len(set(batch.schema.names)) < batch.num_columns:
        raise ValueError("two columns have the same name")
    # without this option, a map such as the arguments of a call becomes a list of pairs; with it, other columns are slower
    options = {"maps_as_pydicts": "strict"} if any("map<" in str(field.type) for field in batch.schema) else {}
    for start in range(0, batch.num_rows, _ROWS):
        for row in batch.slice(start, _ROWS).to_pylist(**options):
            yield _without_none(row)


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


class _Stream(io.RawIOBase):
    """Stream of a scanner's bytes for pyarrow, without the magic of an Arrow file."""

    def __init__(self, scanner: Scanner) -> None:
        self._scanner = scanner
        self.is_file = files.read_range(scanner.path, 0, min(scanner.size, 8)) == _FILE_HEAD
        if self.is_file:
            scanner.take(len(_FILE_HEAD))

    def read(self, count: int = -1) -> bytes:
        return self._scanner.take(min(count, self._scanner.size - self._scanner.position))


def _parts(scanner: Scanner) -> tuple[list[Part], bool]:
    """Return the parts of a file, and whether its dictionaries change after the first record batch."""
    from pyarrow import ArrowException, PythonFile, ipc

    path, size = scanner.path, scanner.size
    stream = _Stream(scanner)
    batches_end = 0  # offset after the last message that was read
    first_dictionaries = 0  # number of dictionaries before the first batch
    try:
        reader = ipc.open_stream(PythonFile(stream))
        batches_end = scanner.position
        for batch in reader:
            scanner.add(batch.num_rows, scanner.position - batches_end)
            batches_end = scanner.position
            first_dictionaries = first_dictionaries or reader.stats.num_dictionary_batches
        scanner.end_part()
    except GrainSftError:
        raise
    except (ArrowException, OSError, ValueError) as error:
        raise damaged(path, batches_end, "a message of Arrow") from error
    stream_end = scanner.position
    if read_exactly(path, size, batches_end, stream_end) != _END_OF_STREAM:
        raise CorpusFileError(f"{path}: ends without Arrow's end-of-stream marker. Is it cut short? Copy it again.")
    is_complete = stream_end == size
    if stream.is_file:  # a footer, the length of the footer in 4 bytes, and the magic follow the stream
        tail = files.read_range(path, max(stream_end, size - len(_MAGIC) - 4), size)
        footer_size = int.from_bytes(tail[:4], "little")
        is_complete = tail[4:] == _MAGIC and stream_end + footer_size + len(tail) == size
    if not is_complete:
        raise damaged(path, stream_end, "a message of Arrow")
    return scanner.parts, reader.stats.num_dictionary_batches != first_dictionaries


def _head_size(path: str, size: int) -> int:
    """Return the number of bytes of the schema and the dictionaries before the first record batch."""
    from pyarrow import PythonFile, ipc

    scanner, stop = Scanner(path, size), 0
    messages = ipc.MessageReader.open_stream(PythonFile(_Stream(scanner)))
    while messages.read_next_message().type != "record batch":
        stop = scanner.position
    return stop
