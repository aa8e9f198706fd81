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
    """Forward reader of a file. It reads blocks of `BLOCK` bytes, and hashes all that it takes or skips.

    Args:
      path: Path or URL.
      size: Bytes of the file.
      read: Function that is called before each block.

    Attributes:
      position: Offset of the next byte.
    """

    def __init__(self, path: str, size: int, read: ReadReport = lambda position: None) -> None:
        self.path, self.size, self.position = path, size, 0
        self._read = read
        self._block, self._offset = b"", 0  # the block in memory, and the offset of its first byte
        self._begin, self._hash = 0, hashlib.sha256()  # start and hash of the next part

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, and advance. Raise a CorpusFileError if the file has fewer."""
        taken = bytearray()
        while len(taken) < count:
            taken += self._next(count - len(taken))
        return bytes(taken)

    def skip(self, count: int) -> None:
        """Advance by `count` bytes. Raise a CorpusFileError if the file has fewer."""
        while count:
            count -= len(self._next(count))

    def part(self, records: int) -> Part:
        """Return a part with `records` records, from the end of the previous part to `position`."""
        part = Part(self._begin, self.position, records, self._hash.hexdigest())
        self._begin, self._hash = self.position, hashlib.sha256()
        return part

    def _next(self, most: int) -> memoryview:
        """Return the next bytes, at least 1 and at most `most`, and advance."""
        if self.position >= self.size:
            raise CorpusFileError(f"{self.path}: is cut short at byte {self.size}, inside a record. Copy it again.")
        if self.position >= self._offset + len(self._block):
            self._read(self.position)
            self._offset = self.position
            self._block = read_exactly(self.path, self.size, self._offset, self._offset + BLOCK)
        start = self.position - self._offset
        data = memoryview(self._block)[start : start + most]
        self._hash.update(data)
        self.position += len(data)
        return data


def check_digest(path: str, data: bytes | memoryview, digest: str) -> None:
    """Refuse data whose SHA-256 is not `digest`. An empty `digest` accepts all data."""
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise CorpusFileError(f"{path}: changed while it was read. Start again.")


def read_exactly(path: str, size: int, start: int, stop: int) -> bytes:
    """Return bytes `start` to min(`stop`, `size`) of a file of `size` bytes. Refuse a file that became shorter."""
    stop = min(stop, size)
    data = files.read_range(path, start, stop)
    if len(data) < stop - start:
        raise CorpusFileError(f"{path}: was cut short while it was read (expected {size} bytes).")
    return data
