"""Forward reading of a file that hashes its parts."""

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
      read: Function that is called before each block with the number of bytes read so far.

    Attributes:
      position: Offset of the next byte.
    """

    def __init__(self, path: str, size: int, read: Callable[[int], None] = lambda position: None) -> None:
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
        found = Part(self._begin, self.position, records, self._hash.hexdigest())
        self._begin, self._hash = self.position, hashlib.sha256()
        return found

    def _next(self, most: int) -> memoryview:
        """Return the next bytes, at least 1 and at most `most`, and advance."""
        if self.position >= self.size:
            raise CorpusFileError(
                f"{self.path}: ends at byte {self.size}, inside a record. Is it cut short? Copy it again."
            )
        if self.position >= self._offset + len(self._block):
            self._read(self.position)
            self._offset = self.position
            self._block = read_exactly(self.path, self.size, self._offset, self._offset + BLOCK)
        start = self.position - self._offset
        found = memoryview(self._block)[start : start + most]
        self._hash.update(found)
        self.position += len(found)
        return found
