"""Input files, their parts, and units: the pieces of work that workers render."""

import dataclasses


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
      dataset: Number of the file's dataset.
      path: Path or URL.
      size: Bytes of the file.
      kind: "jsonl", "array", "text" (the file is one document), or a name in `inputs.ROW_FILES`.
      compression: "gzip", "zstd" or "".
      parts: Parts, each read whole; None for plain lines, which can be cut anywhere.
      records: Number of lines, elements or rows; 0 until the file is scanned.
      digest: SHA-256 of the digests of the file's units; "" until it is scanned.
      note: Note for the reader of this kind: the encoding of an ArrayRecord's records, or the version of a Parquet file.
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
    """Consecutive records of one input: one of its parts, or the lines that begin in its bytes `start` to `stop`.

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
        """Number of bytes after decompression; for Parquet, an equal share of the file for each part."""
        return self.stop - self.start
