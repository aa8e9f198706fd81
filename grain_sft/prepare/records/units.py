"""`Input`, `Part` and `Unit`: an input file, a range of its records, and that range as a piece of work for a worker."""

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
