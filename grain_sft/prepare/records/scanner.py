"""One pass over a file, which finds where the file can be cut, and hashes its parts."""

import hashlib
from collections.abc import Callable

from grain_sft.errors import CorpusFileError
from grain_sft.prepare.records.units import Part
from grain_sft.prepare.records.unpacked import BLOCK, read_exactly


class Scanner:
    """Forward reader of a file, in blocks.

    Args:
      path: Path or URL.
      size: Bytes of the file.
      read: Function that is called with the number of bytes read, before each block.

    Attributes:
      position: Offset of the next byte.
    """

    def __init__(self, path: str, size: int, read: Callable[[int], None] = lambda position: None) -> None:
        self.path, self.size, self.position = path, size, 0
        self._read = read
        self._block, self._offset = b"", 0  # the block in memory, and the file's offset of its first byte
        self._begin, self._hash = 0, hashlib.sha256()  # of the part that has begun

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes, and pass them. Raise a CorpusFileError where the file has fewer."""
        taken = bytearray()
        while len(taken) < count:
            taken += self._next(count - len(taken))
        return bytes(taken)

    def skip(self, count: int) -> None:
        """Pass `count` bytes. Raise a CorpusFileError where the file has fewer."""
        while count:
            count -= len(self._next(count))

    def part(self, records: int) -> Part:
        """Return the part of `records` records from the end of the last part to here."""
        found = Part(self._begin, self.position, records, self._hash.hexdigest())
        self._begin, self._hash = self.position, hashlib.sha256()
        return found

    def _next(self, most: int) -> memoryview:
        """Pass and return between 1 and `most` bytes."""
        if self.position >= self.size:
            raise CorpusFileError(
                f"{self.path}: ends at byte {self.size}, inside a record. Is it cut short? Copy it again."
            )
        if self.position >= self._offset + len(self._block):
            self._read(self.position)
            self._block, self._offset = (
                read_exactly(self.path, self.size, self.position, self.position + BLOCK),
                self.position,
            )
        start = self.position - self._offset
        found = memoryview(self._block)[start : start + most]
        self._hash.update(found)
        self.position += len(found)
        return found
