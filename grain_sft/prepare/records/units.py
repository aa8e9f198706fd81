"""Input files, their parts, and a scanner that cuts a file into parts."""

import dataclasses
import hashlib
from collections.abc import Callable

from grain_sft.errors import CorpusFileError
from grain_sft.storage import files

BLOCK = 1 << 20  # bytes read at once

ReadReport = Callable[[int], None]
"""Function that a reader calls with the number of bytes of a file that it has read so far."""


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive records of a file.

    Attributes:
      start, stop: The records are the bytes [start, stop) of the decompressed file. For Parquet, see `parquet_file.describe`.
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
      dataset: Number of the dataset that the file belongs to, from 0.
      path: Path or URL.
      size: Bytes of the file.
      kind: "jsonl", "array", "text" (the file is one document), or a name in `inputs.ROW_FILES`.
      compression: "gzip", "zstd" or "".
      parts: Parts of the file; () after `inputs.assemble`. In a file of plain lines (uncompressed JSONL), a line may begin in
        one part and end in another.
      records: Number of lines, array elements or table rows; 0 until the file is scanned.
      digest: SHA-256 of the digests of the file's units; "" until the file is scanned.
      note: What the readers of units need, by kind. "array_record": the encoding of the records, such as "json". "parquet": the
        version of the file. "arrow": the number of bytes before the first record batch, if a unit lacks them. Other kinds: "".
    """

    dataset: int
    path: str
    size: int
    kind: str
    compression: str = ""
    parts: tuple[Part, ...] = ()
    records: int = 0
    digest: str = ""
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Unit(Part):
    """Part of a file that one worker reads. In a file of plain lines, a unit has the lines that begin in [start, stop).

    Attributes:
      number: Number among the units of all inputs, from 0.
      input: Number of the input file, from 0.
      first: Number of the unit's first line, element or row in its input, from 1.
    """

    number: int = 0
    input: int = 0
    first: int = 1

    @property
    def size(self) -> int:
        return self.stop - self.start


class Scanner:
    """Reader of a file from its first byte to its last. It cuts the file into parts and hashes each part.

    Args:
      path, size: The file, and its number of bytes.
      min_bytes: Fewest bytes of content (see `add`) in a part. The last part may have fewer.
      report: Function that is called with `position` before each read.

    Attributes:
      position: Offset of the next byte.
      parts: Parts that have ended.
    """

    def __init__(self, path: str, size: int, min_bytes: int = 0, report: ReadReport = lambda position: None) -> None:
        self.path, self.size, self.position = path, size, 0
        self.parts: list[Part] = []
        self._report = report
        self._block, self._offset = b"", 0  # bytes in memory, and the offset of their first byte
        self._min_bytes = min_bytes
        self._begin_part()

    def take(self, count: int) -> bytes:
        """Return the next `count` bytes. Raise a CorpusFileError if the file has fewer."""
        stop = self.position + count
        if stop > self.size:
            raise CorpusFileError(f"{self.path}: ends in a record at byte {self.size}. Is it cut short? Copy it again.")
        block_end = self._offset + len(self._block)  # offset of the byte after those in memory
        if stop > block_end:
            self._report(self.position)
            data = read_exactly(self.path, self.size, block_end, max(stop, block_end + BLOCK))
            self._block = self._block[self.position - self._offset :] + data  # drops the bytes that were taken
            self._offset = self.position
        taken = self._block[self.position - self._offset : stop - self._offset]
        self._hash.update(taken)
        self.position = stop
        return taken

    def add(self, records: int, content: int) -> None:
        """Count records that end at `position`. End the part if it has enough `content`: bytes as the caller counts them."""
        self._records += records
        self._content += content
        if self._content >= self._min_bytes:
            self.end_part()

    def end_part(self) -> None:
        """End the part at `position`. A part without records is left out."""
        if self._records:
            self.parts.append(Part(self._begin, self.position, self._records, self._hash.hexdigest()))
        self._begin_part()

    def _begin_part(self) -> None:
        self._begin, self._hash = self.position, hashlib.sha256()
        self._records = self._content = 0


def damaged(path: str, byte: int, expected: str) -> CorpusFileError:
    """Return the error for a file that does not have `expected`, such as "a message of Arrow", at `byte`."""
    return CorpusFileError(f"{path}: byte {byte}: not {expected}. Is the file damaged? Write it again.")


def check_digest(path: str, data: bytes | memoryview, digest: str) -> None:
    """Refuse data whose SHA-256 is not `digest`, unless `digest` is empty."""
    if digest and hashlib.sha256(data).hexdigest() != digest:
        raise CorpusFileError(f"{path}: changed while it was read. Start again.")


def read_exactly(path: str, size: int, start: int, stop: int) -> bytes:
    """Return bytes `start` to `stop` of a file of `size` bytes. Refuse a file that became shorter."""
    stop = min(stop, size)
    data = files.read_range(path, start, stop)
    if len(data) < stop - start:
        raise CorpusFileError(f"{path}: was cut short while it was read (expected {size} bytes). Start again.")
    return data
