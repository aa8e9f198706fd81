"""ArrayRecord files, read by their groups of records. A record is a `tf.train.Example`, an object of JSON, or a text.

An ArrayRecord is a Riegeli file: chunks of records, a footer chunk with their offsets, and a postscript with the offset of
the footer. A block header interrupts the chunks at every multiple of 64 KiB. The array_record library reads chunks and checks
their hashes. This module reads only the headers, to find where the file can be cut into units. Of a remote file, it copies
only the chunks of a unit and the footer.

Formats: google/riegeli, doc/riegeli_records_file_format.md; google/array_record, cpp/layout.proto
"""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.example import fields_of
from grain_sft.prepare.records.scanner import Scanner
from grain_sft.prepare.records.strict_json import parse_json
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.prepare.records.unpacked import check_digest, decoded, read_exactly
from grain_sft.storage import files

SAMPLE = 100  # records, at most, that decide the encoding of a file

_MAGIC = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"
_POSTSCRIPT_MAGIC = 0x71930E704FDAE05E
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40  # bytes
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is an ArrayRecord, by its first bytes or its name."""
    return head.startswith(_MAGIC) or walk.is_array_record(path)


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return parts of whole chunks, and the encoding of the records. `read` is called with
    the number of bytes read so far.

    Each part but the last has at least `least` decompressed bytes. The encoding is "example" or "json" if more than half of
    the first records are, else "text".
    """
    scanner, parts = Scanner(path, size, read), list[Part]()
    stop = _footer_offset(path, size)
    expected = previous = records = size_decoded = 0
    for chunk_records, chunk_bytes in _chunks(scanner, stop):
        if previous != expected:  # the last chunk may be smaller
            raise CorpusFileError(
                f"{path}: before byte {scanner.position}: a group of {previous} records among those of {expected}. Expected "
                "groups of one size. Write the file again."
            )
        expected, previous = expected or chunk_records, chunk_records
        records, size_decoded = records + chunk_records, size_decoded + chunk_bytes
        if size_decoded >= least:
            parts.append(scanner.part(records))
            records = size_decoded = 0
    if records:
        parts.append(scanner.part(records))
    if len(list(_chunks(scanner, size - _BLOCK))) != 1:  # only the footer may follow
        raise _damaged(path, stop)
    return tuple(parts), _encoding(path, size, parts[0]) if parts else "text"


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any] | bytes | RecordError]:
    """Yield the records of a unit: features, {"text": ...}, or bytes of JSON; a RecordError if features are missing."""
    for record in _records(entry.path, entry.size, unit, unit.first - 1, unit.records):
        if entry.note == "json":
            yield record
        elif entry.note == "text":
            yield {"text": decoded(record)}
        elif (found := fields_of(record)) is not None:
            yield found
        else:
            error = RecordError("the record is not a tf.train.Example with features, as most of the first records are.")
            error.record = record
            yield error


def _encoding(path: str, size: int, part: Part) -> str:
    sample = [record for record in _records(path, size, part, 0, min(SAMPLE, part.records)) if record]
    if 2 * sum(fields_of(record) is not None for record in sample) > len(sample):
        return "example"
    return "json" if 2 * sum(map(_is_object, sample)) > len(sample) else "text"


def _is_object(record: bytes) -> bool:
    try:
        return isinstance(parse_json(record), dict)
    except RecordError:
        return False


def _records(path: str, size: int, part: Part, first: int, count: int) -> list[bytes]:
    """Return `count` records of a file from record `first`, counted from 0. All are in `part`."""
    from array_record.python.array_record_module import ArrayRecordReader

    where = f"{path}: bytes {part.start} to {part.stop}"
    data = read_exactly(path, size, part.start, part.stop)
    check_digest(path, data, part.digest)
    with _local(path, size, part.start, data) as local:
        try:
            reader = ArrayRecordReader(local, _OPTIONS)
            try:
                found: list[bytes] = reader.read(first, first + count) if count else []
            finally:
                reader.close()  # raises errors of the file that `read` hides
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise CorpusFileError(f"{where}: can't be read as ArrayRecord ({error}). Write the file again.") from error
    if len(found) != count:
        raise CorpusFileError(f"{where}: {len(found)} records, expected {count}. Write the file again.")
    return found


@contextlib.contextmanager
def _local(path: str, size: int, start: int, data: bytes) -> Iterator[str]:
    """Yield the path of a local file with the bytes from `start` on and the footer: the file itself, or a sparse copy."""
    if not files.is_remote(path):
        yield path
        return
    footer = _footer(path, size)
    with tempfile.NamedTemporaryFile(prefix="grain_sft-") as copy:
        for offset, content in ((start, data), (size - len(footer), footer)):
            copy.seek(offset)
            copy.write(content)
        copy.flush()
        yield copy.name


@functools.lru_cache(4)
def _footer(path: str, size: int) -> bytes:
    return read_exactly(path, size, _footer_offset(path, size), size)


def _footer_offset(path: str, size: int) -> int:
    """Return the offset of the footer chunk, where the records end."""
    start = size - _BLOCK
    data = read_exactly(path, size, start + _BLOCK_HEADER + _CHUNK_HEADER, size) if start > 0 else b""
    if data[:2] == b"\0\3":  # no compression, three copies of the postscript
        fields = _varints(data[5 : 5 + data[2]])
        if fields[::2] == [8, 16] and fields[3:] == [_POSTSCRIPT_MAGIC] and fields[1] <= start:
            return fields[1]
    raise CorpusFileError(
        f"{path}: byte {max(0, start)}: expected the last 64 KiB of an ArrayRecord. Is the file cut short? Copy it again."
    )


def _varints(data: bytes) -> list[int]:
    found, value, shift = [], 0, 0
    for byte in data:
        value, shift = value | (byte & 127) << shift, shift + 7
        if byte < 128:
            found.append(value)
            value = shift = 0
    return found


def _chunks(scanner: Scanner, stop: int) -> Iterator[tuple[int, int]]:
    """Yield the number of records and of decompressed bytes of each chunk that has records, after skipping it, up to byte
    `stop`."""
    while scanner.position < stop:
        begin = scanner.position
        header = b"".join(map(scanner.take, _steps(scanner, _CHUNK_HEADER)))
        size, records = (int.from_bytes(header[place : place + 8], "little") for place in (8, 24))
        records >>= 8  # the byte before is the type
        if scanner.position + size > stop:
            raise _damaged(scanner.path, begin)
        for step in _steps(scanner, size):
            scanner.skip(step)
        least_end = begin + records  # each record has a position of its own, also an empty one
        least_end += max(0, _BLOCK_HEADER - least_end % _BLOCK) if least_end % _BLOCK else 0
        if max(least_end, scanner.position) > stop:
            raise _damaged(scanner.path, begin)
        scanner.skip(max(0, least_end - scanner.position))
        if records:
            yield records, int.from_bytes(header[32:], "little")


def _steps(scanner: Scanner, count: int) -> Iterator[int]:
    """Yield numbers of bytes that sum to `count`, and skip the block headers between them. The caller takes or skips the
    bytes."""
    while count:
        if not scanner.position % _BLOCK:
            scanner.skip(_BLOCK_HEADER)
        step = min(count, _BLOCK - scanner.position % _BLOCK)
        yield step
        count -= step


def _damaged(path: str, byte: int) -> CorpusFileError:
    return CorpusFileError(f"{path}: byte {byte}: not a chunk of ArrayRecord. Is the file damaged? Write it again.")
