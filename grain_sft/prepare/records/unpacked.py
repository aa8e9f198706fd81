"""Compressed files, JSON arrays and texts, cut between records into parts of several MiB.

A part of a compressed file is reached by decompressing the bytes before it, so each thread reads a file forward, once.
"""

import hashlib
import itertools
import re
import shlex
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, PrepareError, RecordError, import_extra
from grain_sft.prepare.records import walk
from grain_sft.prepare.records.units import Part
from grain_sft.storage import files

BLOCK = 1 << 20  # bytes read at once
MAX_RECORD = 1 << 28  # bytes; a longer record is a mistake

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x50\x2a\x4d\x18": "zstd"}  # the last one is pzstd's
_UNSUPPORTED = {b"BZh": "bunzip2 -k", b"\xfd7zXZ\x00": "unxz -k", b"PK\x03\x04": "unzip"}
_ROWS = {b"PAR1": "Parquet", b"ARROW1": "Arrow", b"\xff\xff\xff\xff": "Arrow", b"\x83\xaf\x70\xd1": "ArrayRecord"}
_STEPS = {"gzip": 1 << 15, "zstd": 1 << 12}  # compressed bytes decoded at once; no data expands them to over 128 MiB
_SPACE = b" \t\r\n"
_HEAD = 64  # bytes that decide the kind of a file
_OBJECT = re.compile(rb'(\[\s*)?\{\s*["}]')
BOM = b"\xef\xbb\xbf"

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_TOKEN = re.compile(rb'\{(?:[^"{}\[\]]++|' + _STRING + rb")*+\}|" + _STRING + rb'|["\[\]{},]', re.DOTALL)
"""An object without nested ones, a string, a bracket, a comma, or the quote that opens a string without an end. `_tokens`
skips objects and strings. Skipping objects makes reading arrays of chats 3 times as fast as skipping strings alone."""


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
    """Return the text of UTF-8 bytes. Return other bytes unchanged: the checks of a record refuse them."""
    try:
        return data.removeprefix(BOM).decode()
    except UnicodeDecodeError:
        return data


def parts_of(
    path: str, size: int, compression: str, kind: str, least: int, read: Callable[[int], None]
) -> Iterator[Part]:
    """Yield the parts of a file, each of at least `least` bytes except the last. Call `read` with the number of bytes read."""
    data = _decompressed(path, size, compression, read)
    return {"array": _parts_of_array, "jsonl": _parts_of_lines, "text": _part_of_text}[kind](path, data, least)


def check_digest(path: str, data: bytes | memoryview, digest: str) -> None:
    """Refuse data whose SHA-256 is not `digest`, if that is known."""
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise CorpusFileError(f"{path}: changed while it was read. Start again.")


def read_exactly(path: str, size: int, start: int, stop: int) -> bytes:
    """Return bytes `start` to min(`stop`, `size`) of a file of `size` bytes. Refuse a file that became shorter."""
    stop = min(stop, size)
    data = files.read_range(path, start, stop)
    if len(data) < stop - start:
        raise CorpusFileError(f"{path}: was cut short while it was read (expected {size} bytes).")
    return data


def elements(data: bytes) -> Iterator[bytes]:
    """Yield the bytes of each element in a part of an array."""
    depth = start = 0
    for place, token in _tokens(data):
        if token in b"[{":
            depth += 1
        elif token in b"]}":
            depth = max(0, depth - 1)
        elif token == ord(",") and not depth:
            yield data[start:place].strip(_SPACE)
            start = place + 1
    yield data[start:].strip(_SPACE)


def _tokens(data: bytes | bytearray, start: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the offset and byte of every one-byte match of `_TOKEN`."""
    for found in _TOKEN.finditer(data, start):
        if found.end() - found.start() == 1:
            yield found.start(), data[found.start()]


def _parts_of_lines(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    data, offset, number = bytearray(), 0, 1
    for piece in pieces:
        data += piece
        end = data.rfind(b"\n", len(data) - len(piece)) + 1
        if end and end >= least:
            lines = data.count(b"\n", 0, end)
            yield _part(data, 0, end, offset, lines)
            offset, number = offset + end, number + lines
            del data[:end]
        if len(data) > MAX_RECORD + least:
            number += data.count(b"\n")
            raise RecordError(f"{path}:{number}: a line of more than {MAX_RECORD} bytes; expected at most that.")
    if data:
        yield _part(data, 0, len(data), offset, data.count(b"\n") + (not data.endswith(b"\n")))


def _part_of_text(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > MAX_RECORD:
            raise RecordError(f"{path}: a text of more than {MAX_RECORD} bytes; expected at most that. Split it.")
    yield _part(data, 0, len(data), 0, 1)


def _parts_of_array(path: str, pieces: Iterator[bytes], least: int) -> Iterator[Part]:
    """Yield the parts of an array. A part begins after a comma or the first bracket, and ends before a comma or the last
    bracket."""
    data = bytearray()
    while not (offset := data.find(b"[") + 1):
        data += next(pieces)
    del data[:offset]
    depth = scanned = records = total = wanted = 0
    for piece in pieces:
        data += piece
        if piece and len(data) < wanted:
            continue
        cut = 0
        for place, token in _tokens(data, scanned):
            scanned = place + 1
            if token == ord('"'):
                scanned = place  # the string ends in a later piece
                break
            if token in b"[{":
                depth += 1
            elif token in b"]}" and depth:
                depth -= 1
            elif token == ord("]"):
                if total or data[cut:place].strip(_SPACE):
                    yield _part(data, cut, place, offset, records + 1)
                if any(piece.strip(_SPACE) for piece in itertools.chain([bytes(data[place + 1 :])], pieces)):
                    name = shlex.quote(path)
                    raise CorpusFileError(
                        f"{path}: text follows the end of the array, at byte {offset + place + 1}. Expected one array in a "
                        "file. If each line is a list of messages, make records of them: "
                        f"jq -c '{{messages: .}}' {name} > {name}.jsonl"
                    )
                return
            elif token == ord(",") and not depth:
                records, total = records + 1, total + 1
                if place - cut >= least:
                    yield _part(data, cut, place, offset, records)
                    cut, records = place + 1, 0
        del data[:cut]
        offset, scanned = offset + cut, scanned - cut
        # A string without an end is scanned again from its start, so wait until the data doubles.
        wanted = 2 * len(data)
        if len(data) > MAX_RECORD + least:
            raise RecordError(f"{path}:{total + 1}: a record of more than {MAX_RECORD} bytes; expected at most that.")
    raise CorpusFileError(f"{path}: is an array without its closing bracket after {total} records. Is it cut short?")


def _part(data: bytes | bytearray, start: int, stop: int, offset: int, records: int) -> Part:
    digest = hashlib.sha256(memoryview(data)[start:stop]).hexdigest()
    return Part(offset + start, offset + stop, records, digest)


def _decompressed(
    path: str, size: int, compression: str, read: Callable[[int], None] = lambda position: None
) -> Iterator[bytes]:
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
                found = f"can't be decompressed near byte {position + start} ({compression}: {error})"
                fix = "Copy it again if it is damaged, or compress it with a smaller window if it needs too much memory"
                raise CorpusFileError(f"{path}: {found}. {fix}.") from error
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


_reading = threading.local()
"""`_reading.file`: state of the compressed file that this thread reads: (path, size, compression), the decompressed data that
are read but not yet returned, preceded by their offset, and the iterator of the pieces after them."""


def read_part(path: str, size: int, compression: str, part: Part) -> bytes:
    """Return the bytes of a part, decompressed. Refuse a part that changed since it was found.

    Reading an earlier part of a compressed file decompresses the file from the beginning.
    """
    if compression:
        key, start, stop = (path, size, compression), part.start, part.stop
        open_file, offset, data, pieces = getattr(_reading, "file", None) or ((), 0, bytearray(), iter(()))
        _reading.file = None  # after an error, begin again
        if open_file != key or start < offset:
            offset, data, pieces = 0, bytearray(), _decompressed(*key)
        while offset + len(data) < stop and (piece := next(pieces, b"")):
            skipped = min(start - offset, len(data))
            del data[:skipped]
            data += piece
            offset += skipped
        found = bytes(data[start - offset : stop - offset])
        end = min(stop - offset, len(data))
        del data[:end]
        _reading.file = (key, offset + end, data, pieces)
    else:
        found = files.read_range(path, part.start, part.stop)
    check_digest(path, found, part.digest)
    return found
