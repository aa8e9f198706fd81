"""Input files, their parts, and `Scanner`, which cuts a file into parts.

A `Part` is a range of an input's records, and a `Unit` is such a range as a piece of work for a worker.
"""

import dataclasses
import hashlib
from collections.abc import Callable

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files

BLOCK = 1 << 20  # bytes read at once

ReadReport = Callable[[int], None]
"""Function that is called with the number of bytes of a file that were read so far."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Whole records in the bytes `start` to `stop` of a file, counted after decompression.

    Attributes:
      records: Number of records; 0 until they are counted.
      digest: SHA-256 of the bytes; "" until it is computed.
    """

    start: int
    stop: int
    records: int = 0
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class Input:
    """An input file.

    Attributes:
      dataset: Number of the dataset that the file belongs to.
      path: Path or URL.
      size: Bytes of the file.
      kind: "jsonl", "array", "text" (the file is one document), or a name in `inputs.ROW_FILES`.
      compression: "gzip", "zstd" or "".
      parts: Parts, each read whole; None for plain lines, which can be cut anywhere.
      records: Number of lines, array elements or table rows; 0 until the file is scanned.
      digest: SHA-256 of the digests of the file's units; "" until it is scanned.
      note: Encoding of an ArrayRecord's records, or version of a Parquet file; "" for other kinds.
    """

    dataset: int
    path: str
    size: int
    kind: str
    compression: str = ""
    parts: tuple[Part, ...] | None = None
    records: int = 0
    digest: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Unit(Part):
    """Piece of work: one part of an input, or the lines that begin in bytes `start` to `stop` of a file of plain lines.

    Attributes:
      number: Number among the units of all inputs.
      input: Number of the unit's input.
      first: Number of the unit's first line, element or row in its input, from 1.
    """

    number: int = 0
    input: int = 0
    first: int = 1

    @property
    def size(self) -> int:
        """Number of bytes after decompression; for Parquet, an equal share of the file."""
        return self.stop - self.start


class Scanner:
    """Forward reader of a file. It reads at least `BLOCK` bytes at once, cuts the file into parts, and hashes each part.

    Args:
      path: Path or URL.
      size: Bytes of the file.
      least: A part ends when the `content` passed to `add` sums to this many bytes. The last part may have fewer.
      read: Function that is called with `position` before each read.

    Attributes:
      position: Offset of the next byte.
      parts: Parts that have ended.
    """

    def __init__(self, path: str, size: int, least: int = 0, read: ReadReport = lambda position: None) -> None:
        self.path, self.size, self.position = path, size, 0
        self.parts: list[Part] = []
        self._read = read
        self._block, self._offset = b"", 0  # bytes in memory, and the offset of the first one
        self._least = least
        self._begin_part()

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, and advance. Raise a CorpusFileError if the file has fewer."""
        stop = self.position + count
        if stop > self.size:
            raise CorpusFileError(f"{self.path}: ends in a record at byte {self.size}. Is it cut short? Copy it again.")
        block_end = self._offset + len(self._block)
        if stop > block_end:
            self._read(self.position)
            data = read_exactly(self.path, self.size, block_end, max(stop, block_end + BLOCK))
            self._block = self._block[self.position - self._offset :] + data  # drops the bytes that were taken
            self._offset = self.position
        taken = self._block[self.position - self._offset : stop - self._offset]
        self._hash.update(taken)
        self.position = stop
        return taken

    def add(self, records: int, content: int) -> None:
        """Count records before `position`, and the bytes of their content. End the part if it has enough."""
        self._records += records
        self._content += content
        if self._content >= self._least:
            self.end_part()

    def end_part(self) -> None:
        """End the part at `position`. Leave it out if it has no records, such as the bytes after the last record."""
        if self._records:
            self.parts.append(Part(self._begin, self.position, self._records, self._hash.hexdigest()))
        self._begin_part()

    def _begin_part(self) -> None:
        self._begin, self._hash = self.position, hashlib.sha256()
        self._records = self._content = 0


def damaged(path: str, byte: int, expected: str) -> CorpusFileError:
    """Return the error for a file that lacks what is `expected` at a byte."""
    return CorpusFileError(f"{path}: byte {byte}: not {expected}. Is the file damaged? Write it again.")


def check_digest(path: str, data: bytes | memoryview, digest: str) -> None:
    """Refuse data whose SHA-256 is not `digest`. An empty `digest` accepts all data."""
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise CorpusFileError(f"{path}: changed while it was read. Start again.")


def read_exactly(path: str, size: int, start: int, stop: int) -> bytes:
    """Return bytes `start` to min(`stop`, `size`) of a file of `size` bytes. Refuse a file that became shorter."""
    stop = min(stop, size)
    data = files.read_range(path, start, stop)
    if len(data) < stop - start:
        raise CorpusFileError(f"{path}: was cut short while it was read (expected {size} bytes). Start again.")
    return data
