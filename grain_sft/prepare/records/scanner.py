"""Reading of byte ranges, and `Scanner`, which goes through a file once, cuts it into parts and hashes each part."""

import hashlib
from collections.abc import Callable

from grain_sft.errors import CorpusFileError
from grain_sft.prepare.records.units import Part
from grain_sft.storage import files

BLOCK = 1 << 20  # bytes read at once

ReadReport = Callable[[int], None]
"""Function that is called with the number of bytes of a file that were read so far."""


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
            raise CorpusFileError(
                f"{self.path}: ends at byte {self.size}, inside a record. Is it cut short? Copy it again."
            )
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
