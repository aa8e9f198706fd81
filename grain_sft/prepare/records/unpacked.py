"""Compressed files, JSON arrays and texts, cut between records into parts of several MiB.

A part of a compressed file is reached by decompressing all bytes before it. So each thread keeps its file open, and reads on.
"""

import hashlib
import itertools
import re
import shlex
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, PrepareError, RecordError, import_extra
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.scanner import BLOCK, ReadReport, check_digest, read_exactly
from grain_sft.prepare.records.units import Part
from grain_sft.storage import files

MAX_RECORD = 1 << 28  # bytes; a longer record is a mistake

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x50\x2a\x4d\x18": "zstd"}  # the last one is pzstd's
_UNSUPPORTED = {b"BZh": "bunzip2 -k", b"\xfd7zXZ\x00": "unxz -k", b"PK\x03\x04": "unzip"}
_ROWS = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x83\xaf\x70\xd1": "ArrayRecord"}
_STEPS = {"gzip": 1 << 15, "zstd": 1 << 12}  # compressed bytes decoded at once, which become at most 128 MiB
_SPACE = b" \t\r\n"
_HEAD = 64  # bytes that decide the kind of a file
_OBJECT = re.compile(rb'(\[\s*)?\{\s*["}]')
BOM = b"\xef\xbb\xbf"

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb'\{(?:[^"{}\[\]]++|' + _STRING + rb")*+\}|" + _STRING + rb'|["\[\]{},]', re.DOTALL)
"""A whole object without nested ones, a whole string, a bracket, a comma, or a quote. A quote matches alone if the string does
not end in the data.

`_tokens` skips objects and strings. Skipping objects makes reading arrays of chats 3 times as fast as skipping only strings."""


def compression_of(path: str, head: bytes) -> str:
    """Return "gzip", "zstd" or "", by a file's first bytes. Refuse other compressions."""
    for magic, command in _UNSUPPORTED.items():
        if head.startswith(magic):
            raise PrepareError(
                f"{path}: is compressed in a way that is not supported. Expected plain, .gz or .zst files. "
                f"Decompress it: {command} {shlex.quote(path)}"
            )
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def kind_of(path: str, size: int, compression: str) -> str:
    """Return the kind of a file: "text", "array" or "jsonl". Refuse compressed Parquet, Arrow and ArrayRecord files.

    A file is a text if `walk.is_text` accepts its name and it does not begin like a JSON object or an array of objects. Any
    other file is an array if its first character that is not blank is "[", else JSONL.
    """
    head = b""
    for data in _decompressed(path, size, compression):
        head = (head + data).removeprefix(BOM).lstrip(_SPACE)
        if len(head) >= _HEAD:
            break
    for magic, name in _ROWS.items():
        if head.startswith(magic):
            raise PrepareError(f"{path}: a compressed {name} file can't be read from the middle. Decompress it.")
    if walk.is_text(path) and not _OBJECT.match(head):
        return "text"
    return "array" if head.startswith(b"[") else "jsonl"


def decoded(data: bytes) -> str | bytes:
    """Return the text of UTF-8 bytes. Return other bytes unchanged: the parser of the record refuses bytes."""
    try:
        return data.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        return data


def parts_of(path: str, size: int, compression: str, kind: str, least: int, read: ReadReport) -> Iterator[Part]:
    """Yield the parts of a file, each of about `least` decompressed bytes. A text is one part."""
    data = _decompressed(path, size, compression, read)
    return {"array": _parts_of_array, "jsonl": _parts_of_lines, "text": _part_of_text}[kind](path, data, least)


def too_long(where: str, what: str) -> RecordError:
    """Return the error for a record of more than `MAX_RECORD` bytes."""
    return RecordError(f"{where}: a {what} of more than {MAX_RECORD} bytes; expected at most that. Split it.")


def elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element in a part of an array."""
    depth = start = 0
    for index, token in _tokens(data):
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth = max(0, depth - 1)
        elif token == ord(",") and not depth:
            yield data[start:index].strip(_SPACE)
            start = index + 1
    yield data[start:].strip(_SPACE)


def _tokens(data: bytes | bytearray) -> Iterator[tuple[int, int]]:
    """Yield the index and the byte of each bracket, comma and quote that `_TOKEN` matches alone."""
    for match in _TOKEN.finditer(data):
        if match.end() - match.start() == 1:
            yield match.start(), data[match.start()]


def _parts_of_lines(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the parts of a file of lines. A part is whole lines."""
    data = bytearray()  # of the next part, from `offset` on
    offset = 0
    line = 1  # number of the first line in `data`
    for piece in pieces:
        data += piece
        end = data.rfind(b"\n", len(data) - len(piece)) + 1
        if end and end >= least:
            num_lines = data.count(b"\n", 0, end)
            yield _part(data, 0, end, offset, num_lines)
            offset += end
            line += num_lines
            del data[:end]
        if len(data) > MAX_RECORD + least:
            line += data.count(b"\n")
            raise too_long(f"{path}:{line}", "line")
    if data:
        num_lines = data.count(b"\n") + (0 if data.endswith(b"\n") else 1)
        yield _part(data, 0, len(data), offset, num_lines)


def _part_of_text(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the whole text as one part."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > MAX_RECORD:
            raise too_long(path, "text")
    yield _part(data, 0, len(data), 0, 1)


def _parts_of_array(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the parts of an array, each of about `least` bytes. A part begins after a comma or "[", and ends before a comma or
    "]"."""
    data = bytearray()  # of the next part, from `offset` on
    while not (offset := data.find(b"[") + 1):
        data += next(pieces)
    del data[:offset]
    total = 0  # records of the parts before `data`
    records = 0  # whole records in `data`, which a comma follows
    next_scan = least  # `data` is scanned when it has this many bytes
    for piece in pieces:
        data += piece
        if piece and len(data) < next_scan:  # an empty piece means the end of the file
            continue
        records = depth = stop = 0  # depth: open brackets and braces of a record; stop: index of the last comma
        for index, token in _tokens(data):
            if token == ord('"'):
                break  # the string ends in a later piece
            if token in b"[{":
                depth += 1
            elif token in b"]}" and depth:
                depth -= 1
            elif token == ord(",") and not depth:
                records += 1
                stop = index
            elif token == ord("]"):
                if total or data[:index].strip(_SPACE):
                    yield _part(data, 0, index, offset, records + 1)
                _check_end(path, itertools.chain([bytes(data[index + 1 :])], pieces), offset + index + 1)
                return
        if records:
            yield _part(data, 0, stop, offset, records)
            del data[: stop + 1]
            offset += stop + 1
            total += records
            records = 0
        if len(data) > MAX_RECORD + least:
            raise too_long(f"{path}:{total + records + 1}", "record")
        # The next scan begins at the start of the unfinished record again. So it waits until `data` has doubled.
        next_scan = len(data) + max(least, len(data))
    raise CorpusFileError(
        f"{path}: is an array without its closing bracket after {total + records} records. Is it cut short?"
    )


def _check_end(path: str, pieces: Iterable[bytes], offset: int) -> None:
    """Refuse a file with text after its array, which ends at `offset`."""
    if any(piece.strip(_SPACE) for piece in pieces):
        name = shlex.quote(path)
        raise CorpusFileError(
            f"{path}: text follows the end of the array, at byte {offset}. Expected one array in a file. If each line is a "
            f"list of messages, make records of them: jq -c '{{messages: .}}' {name} > {name}.jsonl"
        )


def _part(data: bytearray, start: int, stop: int, offset: int, records: int) -> Part:
    """Return the part of `data[start:stop]`, where `data` begins at byte `offset` of the file."""
    digest = hashlib.sha256(memoryview(data)[start:stop]).hexdigest()
    return Part(offset + start, offset + stop, records, digest)


def _decompressed(path: str, size: int, compression: str, read: ReadReport = lambda position: None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces, then an empty piece."""
    decoder: Any = None
    for position in range(0, size, BLOCK):
        read(position)
        data = read_exactly(path, size, position, position + BLOCK)
        if not compression:
            yield data
            continue
        start = 0
        while start < len(data):
            if decoder is None:
                if not data[start]:  # padding after a gzip member
                    start = len(data) - len(data[start:].lstrip(b"\0"))
                    continue
                decoder = _decoder(path, compression)
            stop = min(start + _STEPS[compression], len(data))
            try:
                piece = decoder.decompress(data[start:stop])
            except Exception as error:  # zlib.error, zstandard.ZstdError
                raise CorpusFileError(
                    f"{path}: can't be decompressed near byte {position + start} ({compression}: {error}). Copy it again if it "
                    "is damaged, or compress it with a smaller window if it needs too much memory."
                ) from error
            if piece:
                yield piece
            start = stop
            if decoder.eof:
                start -= len(decoder.unused_data)
                decoder = None
    if decoder is not None:
        raise CorpusFileError(f"{path}: ends in the middle of its {compression} data. Is it cut short? Copy it again.")
    yield b""


def _decoder(path: str, compression: str) -> Any:
    if compression == "gzip":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)
    zstandard = import_extra("zstandard", f"{path}: reading .zst files", "zstandard", "zstd")
    return zstandard.ZstdDecompressor().decompressobj()


class _Reader:
    """Forward reader of a compressed file. `_data` has the bytes from `offset` on that are decompressed but not yet read."""

    def __init__(self, path: str, size: int, compression: str) -> None:
        self.file = (path, size, compression)
        self.offset = 0
        self._data = bytearray()
        self._pieces = _decompressed(path, size, compression)

    def read(self, start: int, stop: int) -> bytes:
        """Return decompressed bytes `start` to `stop`, or fewer if the file ends. `start` is at least `offset`."""
        while self.offset + len(self._data) < stop and (piece := next(self._pieces, b"")):
            self._skip_to(start)
            self._data += piece
        data = bytes(self._data[start - self.offset : stop - self.offset])
        self._skip_to(stop)
        return data

    def _skip_to(self, offset: int) -> None:
        count = min(offset - self.offset, len(self._data))
        del self._data[:count]
        self.offset += count


_thread = threading.local()
"""`_thread.reader`: reader of the compressed file that this thread read last."""


def read_part(path: str, size: int, compression: str, part: Part) -> bytes:
    """Return the bytes of a part, decompressed. Refuse a part that changed since it was found."""
    if compression:
        reader: _Reader | None = getattr(_thread, "reader", None)
        _thread.reader = None  # after an error, begin again
        if reader is None or reader.file != (path, size, compression) or part.start < reader.offset:
            reader = _Reader(path, size, compression)
        data = reader.read(part.start, part.stop)
        _thread.reader = reader
    else:
        data = files.read_range(path, part.start, part.stop)
    check_digest(path, data, part.digest)
    return data
