"""Input files and their units: the results of a scan, and the pieces of work that are sent to workers."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Part:
    """Whole records in the bytes `start` to `stop` of a file, decompressed.

    Attributes:
      records: Number of the records; 0 until they are counted.
      digest: SHA-256 of the bytes; "" until it is computed.
    """

    start: int
    stop: int
    records: int = 0
    digest: str = ""


@dataclasses.dataclass(frozen=True)
class Input:
    """One file.

    Attributes:
      dataset: Number of its dataset.
      path: Path or URL.
      size: Bytes of the file.
      kind: "jsonl", "array", "text" (the file is one document), or a name in `inputs.ROW_FILES`.
      compression: "gzip", "zstd" or "".
      parts: Parts that are read whole; None for plain lines, which can be cut anywhere.
      records: Number of its lines, elements or rows, once it is scanned.
      digest: Hash of its content, once it is scanned: SHA-256 over those of its units.
      note: What its reader needs: the encoding of an ArrayRecord's records, the version of a Parquet file.
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
      input: Number of its input.
      first: Number of its first line, element or row in its input.
    """

    number: int = 0
    input: int = 0
    first: int = 1

    @property
    def size(self) -> int:
        """Number of bytes, decompressed; of Parquet, an equal share of the file for each part."""
        return self.stop - self.start
