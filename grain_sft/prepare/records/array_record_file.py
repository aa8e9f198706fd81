"""Reader of ArrayRecord files, whose records are `tf.train.Example`s, JSON objects or texts.

An ArrayRecord is a Riegeli file: chunks of records, a footer chunk with the offsets of the chunks, and a postscript with the
offset of the footer. A block header interrupts the chunks at every multiple of 64 KiB. The array_record library decodes chunks
of local files only. A part is a range of whole chunks.

Formats: google/riegeli, doc/riegeli_records_file_format.md; google/array_record, cpp/layout.proto
"""

import contextlib
import functools
import tempfile
from collections.abc import Iterator
from typing import Any

from google.protobuf import message

from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare.protobuf import message_class
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.example import fields_of
from grain_sft.prepare.records.strict_json import decoded, parse_json
from grain_sft.prepare.records.units import Input, Part, ReadReport, Scanner, Unit, check_digest, damaged, read_exactly
from grain_sft.storage import files

SAMPLE = 100  # the encoding of a file is inferred from the first 100 records of its first part

_MAGIC = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"  # first bytes of a Riegeli file
_POSTSCRIPT_FILE = """
name: "postscript.proto" package: "array_record" syntax: "proto2"
message_type {
  name: "Postscript"
  field { name: "footer_offset" number: 1 type: TYPE_UINT64 label: LABEL_OPTIONAL }
  field { name: "magic" number: 2 type: TYPE_UINT64 label: LABEL_OPTIONAL }
}
"""
"""Definition of the postscript, as a `FileDescriptorProto` in the text format of protobuf."""

_POSTSCRIPT_MAGIC = 0x71930E704FDAE05E
_BLOCK, _BLOCK_HEADER, _CHUNK_HEADER = 1 << 16, 24, 40  # bytes
_BLOCK_CONTENT = _BLOCK - _BLOCK_HEADER
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # what array_record recommends for random access


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is an ArrayRecord, by its first bytes or its name."""
    return head.startswith(_MAGIC) or walk.ARRAY_RECORD_NAME.search(path) is not None


def describe(path: str, size: int, min_bytes: int, report: ReadReport) -> tuple[tuple[Part, ...], str]:
    """Return the parts of a file, and the encoding of its records: "example", "json" or "text". See `inputs.ROW_FILES`."""
    _footer.cache_clear()  # the cached footer may be that of an earlier file with the same path and size
    scanner = Scanner(path, size, min_bytes, report)
    footer_offset = _footer_offset(path, size)
    chunks: list[int] = []  # number of records of each chunk
    for records, decompressed_bytes in _chunks(scanner, footer_offset):
        if chunks and chunks[-1] != chunks[0]:  # only the last chunk may differ
            raise damaged(path, scanner.position, f"the end of a group of {chunks[0]} records")
        chunks.append(records)
        scanner.add(records, decompressed_bytes)
    scanner.end_part()
    if len(list(_chunks(scanner, size - _BLOCK))) != 1:  # the only chunk after the records is the footer
        raise damaged(path, footer_offset, "a chunk of ArrayRecord")
    parts = tuple(scanner.parts)
    return parts, _encoding(path, size, parts[0]) if parts else "text"


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any] | bytes | RecordError]:
    """Yield the records of a unit: dicts of features, {"text": ...}, bytes of JSON, or errors."""
    for record in _records(entry.path, entry.size, unit, unit.first - 1, unit.records):
        if entry.note == "json":
            yield record
        elif entry.note == "text":
            yield {"text": decoded(record, "utf-8-sig")}
        elif (features := fields_of(record)) is not None:
            yield features
        else:
            error = RecordError("the record is not a tf.train.Example with features, as most of the first records are.")
            error.record = record  # the rejected record is stored as these bytes
            yield error


def _encoding(path: str, size: int, first_part: Part) -> str:
    """Return the encoding that more than half of the first records have: "example", "json", or else "text"."""
    sample = [record for record in _records(path, size, first_part, 0, min(SAMPLE, first_part.records)) if record]
    if 2 * sum(fields_of(record) is not None for record in sample) > len(sample):
        return "example"
    return "json" if 2 * sum(map(_is_object, sample)) > len(sample) else "text"


def _is_object(record: bytes) -> bool:
    with contextlib.suppress(RecordError):
        return isinstance(parse_json(record), dict)
    return False


def _records(path: str, size: int, part: Part, first: int, count: int) -> list[bytes]:
    """Return `count` records of `part`. The first of them is record `first` of the file, from 0."""
    from array_record.python.array_record_module import ArrayRecordReader

    where = f"{path}: bytes {part.start} to {part.stop}"
    data = read_exactly(path, size, part.start, part.stop)
    check_digest(path, data, part.digest)
    with _local(path, size, part.start, data) as local:
        try:
            with contextlib.closing(ArrayRecordReader(local, _OPTIONS)) as reader:
                records: list[bytes] = reader.read(first, first + count)
            # closing the reader raises the errors that `read` hides
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise CorpusFileError(f"{where}: can't be read as ArrayRecord ({error}). Write the file again.") from error
    if len(records) != count:
        raise CorpusFileError(f"{where}: {len(records)} records, expected {count}. Write the file again.")
    return records


@contextlib.contextmanager
def _local(path: str, size: int, start: int, data: bytes) -> Iterator[str]:
    """Yield `path` if it is local, else the path of a sparse copy with `data` at byte `start` and the footer at the end."""
    if not files.is_remote(path):
        yield path
        return
    footer = _footer(path, size)
    with tempfile.NamedTemporaryFile(prefix="grain_sft-") as copy:
        copy.seek(start)
        copy.write(data)
        copy.seek(size - len(footer))
        copy.write(footer)
        copy.flush()
        yield copy.name


@functools.lru_cache(4)
def _footer(path: str, size: int) -> bytes:
    return read_exactly(path, size, _footer_offset(path, size), size)


def _footer_offset(path: str, size: int) -> int:
    """Return the offset of the footer chunk, where the records end."""
    last_block = size - _BLOCK  # offset of the last block, which has only the postscript
    data = read_exactly(path, size, last_block + _BLOCK_HEADER + _CHUNK_HEADER, size) if last_block > 0 else b""
    # byte 0: no compression; byte 1: 3 sizes follow, because the chunk has 3 equal copies of the postscript
    if data[:2] == b"\0\3":
        with contextlib.suppress(message.DecodeError):
            first_copy = data[5 : 5 + data[2]]  # byte 2 is the size of the first copy
            postscript = message_class(_POSTSCRIPT_FILE, "array_record.Postscript").FromString(first_copy)
            if postscript.magic == _POSTSCRIPT_MAGIC and postscript.footer_offset <= last_block:
                return int(postscript.footer_offset)
    raise CorpusFileError(f"{path}: ends without the postscript of an ArrayRecord. Is it cut short? Copy it again.")


def _chunks(scanner: Scanner, stop: int) -> Iterator[tuple[int, int]]:
    """Read the chunks that begin before byte `stop`. Yield (number of records, decompressed bytes) of each that has records."""
    while scanner.position < stop:
        begin = scanner.position
        header = _take(scanner, _CHUNK_HEADER)
        data_size = int.from_bytes(header[8:16], "little")
        records = int.from_bytes(header[25:32], "little")  # byte 24 is the type of the chunk
        # Riegeli's formula. Example: from byte 64 on, a block holds 65,472 bytes of data. One byte more needs a header.
        num_block_headers = (data_size + (scanner.position + _BLOCK_CONTENT - 1) % _BLOCK) // _BLOCK_CONTENT
        data_end = scanner.position + data_size + num_block_headers * _BLOCK_HEADER
        end = max(data_end, _least_end(begin, records))
        if end > stop:
            raise damaged(scanner.path, begin, "a chunk of ArrayRecord")
        scanner.take(end - scanner.position)
        if records:
            yield records, int.from_bytes(header[32:], "little")


def _least_end(begin: int, records: int) -> int:
    """Return the smallest end that Riegeli allows for a chunk.

    A chunk has at least one byte for each record, and does not end in a block header. Riegeli pads shorter chunks.
    """
    end = begin + records
    in_block = end % _BLOCK
    return end - in_block + _BLOCK_HEADER if 0 < in_block < _BLOCK_HEADER else end


def _take(scanner: Scanner, count: int) -> bytes:
    """Return the next `count` bytes of chunks, without the block headers between them."""
    taken = bytearray()
    while len(taken) < count:
        if not scanner.position % _BLOCK:
            scanner.take(_BLOCK_HEADER)
        left_in_block = _BLOCK - scanner.position % _BLOCK
        taken += scanner.take(min(count - len(taken), left_in_block))
    return bytes(taken)
