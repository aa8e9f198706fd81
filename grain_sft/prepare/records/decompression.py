"""Decompression of input files (gzip and zstd), whole or in parts.

To reach a part, all bytes before it must be decompressed. So each thread keeps the reader of its last file, which continues
where the last part ended.
"""

import shlex
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, PrepareError, import_extra
from grain_sft.prepare.records.units import BLOCK, Part, ReadReport, check_digest, read_exactly
from grain_sft.storage import files

_MAGIC = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"\x50\x2a\x4d\x18": "zstd"}  # the last magic is pzstd's
# first bytes of compressions that are refused, and commands that decompress them
_UNSUPPORTED = {b"BZh": "bunzip2 -k", b"\xfd7zXZ\x00": "unxz -k", b"PK\x03\x04": "unzip"}
_DECODED_AT_ONCE = {"gzip": 1 << 15, "zstd": 1 << 12}  # compressed bytes for one call, which returns at most 128 MiB


def compression_of(path: str, head: bytes) -> str:
    """Return "gzip", "zstd" or "", by a file's first bytes. Refuse other compressions."""
    for magic, command in _UNSUPPORTED.items():
        if head.startswith(magic):
            raise PrepareError(f"{path}: not a plain, .gz or .zst file. Decompress it: {command} {shlex.quote(path)}")
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


def decompressed(path: str, size: int, compression: str, report: ReadReport = lambda position: None) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file in pieces, then b"" at its end. Call `report` with the offset of each block."""
    blocks = _blocks(path, size, report)
    yield from _decoded(path, compression, blocks) if compression else (block for _, block in blocks)
    yield b""


def _blocks(path: str, size: int, report: ReadReport) -> Iterator[tuple[int, bytes]]:
    """Yield the pair (offset, bytes) of each block of a file as it is on disk."""
    for offset in range(0, size, BLOCK):
        report(offset)
        yield offset, read_exactly(path, size, offset, offset + BLOCK)


def _decoded(path: str, compression: str, blocks: Iterable[tuple[int, bytes]]) -> Iterator[bytes]:
    """Yield the decompressed bytes of `blocks`, which may have several gzip members or zstd frames."""
    decoder: Any = None  # decoder of the gzip member or zstd frame that is being read
    size = _DECODED_AT_ONCE[compression]
    for offset, block in blocks:
        for start in range(0, len(block), size):
            data = block[start : start + size]
            while data:
                # zero bytes may follow a gzip member, and are skipped
                if decoder is None and not (data := data.lstrip(b"\0")):
                    break
                decoder = decoder or _decoder(path, compression)
                try:
                    piece = decoder.decompress(data)
                except Exception as error:  # zlib.error, zstandard.ZstdError
                    problem = f"{path}: can't be decompressed near byte {offset + start} ({compression}: {error})"
                    fix = "Copy it again if it is damaged, or compress it with a smaller window if it takes too much memory"
                    raise CorpusFileError(f"{problem}. {fix}.") from error
                if piece:
                    yield piece
                data = decoder.unused_data
                if decoder.eof:
                    decoder = None
    if decoder is not None:
        raise CorpusFileError(f"{path}: ends in the middle of its {compression} data. Is it cut short? Copy it again.")


def _decoder(path: str, compression: str) -> Any:
    if compression == "gzip":
        return zlib.decompressobj(zlib.MAX_WBITS | 16)  # 16: zlib's flag for the format gzip
    zstandard = import_extra("zstandard", f"{path}: reading .zst files", "zstandard", "zstd")
    return zstandard.ZstdDecompressor().decompressobj()


class _Reader:
    """Reader of a compressed file that only moves forward. `offset` is the first decompressed byte that it can still return."""

    def __init__(self, path: str, size: int, compression: str) -> None:
        self.file = (path, size, compression)
        self.offset = 0
        self._data = bytearray()  # decompressed bytes from byte `offset` on
        self._pieces = decompressed(path, size, compression)

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
"""`_thread.reader`: reader of this thread's last file."""


def read_part(path: str, size: int, compression: str, part: Part) -> bytes:
    """Return the decompressed bytes of a part, checked by its digest."""
    if compression:
        reader: _Reader | None = getattr(_thread, "reader", None)
        _thread.reader = None  # after an error below, the next call makes a new reader
        if reader is None or reader.file != (path, size, compression) or part.start < reader.offset:
            reader = _Reader(path, size, compression)
        data = reader.read(part.start, part.stop)
        _thread.reader = reader
    else:
        data = files.read_range(path, part.start, part.stop)
    check_digest(path, data, part.digest)
    return data
