"""Writing columns, some lines at a time, with the receipt: as a table for people, JSON lines, CSV or Parquet."""

from __future__ import annotations

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.errors import MissingExtraError, PipelineError
from grain_sft.pipeline import Receipt
from grain_sft.storage import files

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}


class Labels(NamedTuple):
    """A column of few different texts: `texts[number]` for each of `numbers` (int64 [lines]), "" for -1."""

    numbers: npt.NDArray[np.int64]
    texts: Sequence[str]


Column = npt.NDArray[Any] | Labels | list[Any]
Columns = Mapping[str, Column]


class Writer(Protocol):
    """Writer of columns that always have the same names and types."""

    def write(self, columns: Columns) -> None:
        """Add lines, the same number in each column."""
        ...

    def close(self) -> None:
        """Write what follows the last line."""
        ...


@contextlib.contextmanager
def open_writer(kind: str, output: str | None, receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a writer to the file `output`, which appears whole or not at all; None: to standard output.

    Args:
      kind: Name of one of `WRITERS`.
      output: Local path, or URL.
      receipt: Receipt of the pipeline. CSV and tables begin with a line `# <code> <about>`, JSON lines with an object of the
        receipt and its parts; a Parquet file has them in its metadata.
      about: Description of the lines, in a few words.

    Raises:
      StorageError: the file can't be written.
      PipelineError: Parquet to standard output.
      MissingExtraError: Parquet without pyarrow.
    """
    make, binary = WRITERS[kind]
    if output is None:
        if binary:
            raise PipelineError(f"format {kind}: is no text; name a file with --output.")
        yield make(sys.stdout, receipt, about)
        return
    with files.atomic_write(output, "wb" if binary else "w") as file:
        writer = make(file, receipt, about)
        yield writer
        writer.close()


class TableWriter:
    """Aligned columns, numbers with thousands separators, "-" for -1."""

    def __init__(self, file: IO[str], receipt: Receipt, about: str) -> None:
        self._file = file
        self._widths: list[int] = []
        file.write(f"# {receipt.code} {about}\n")

    def write(self, columns: Columns) -> None:
        lines, widths = [], self._widths or [0] * len(columns)
        head, self._widths = not self._widths, []
        for (name, column), width in zip(columns.items(), widths, strict=True):
            cells = _cells(column)
            width = max(width, len(name), *map(len, cells)) if cells else max(width, len(name))
            align = str.ljust if _is_text(column) else str.rjust
            lines.append([align(cell, width) for cell in ([name] if head else []) + cells])
            self._widths.append(width)
        self._file.writelines("  ".join(line).rstrip() + "\n" for line in zip(*lines, strict=True))

    def close(self) -> None:
        pass


class CsvWriter:
    """A comment line, a line of names, then the lines."""

    def __init__(self, file: IO[str], receipt: Receipt, about: str) -> None:
        self._csv = csv.writer(file, lineterminator="\n")
        self._begun = False
        file.write(f"# {receipt.code} {about}\n")

    def write(self, columns: Columns) -> None:
        if not self._begun:
            self._csv.writerow(columns)
            self._begun = True
        self._csv.writerows(zip(*map(_values, columns.values()), strict=True))

    def close(self) -> None:
        pass


class JsonlWriter:
    """A line with the receipt and its parts, then an object per line."""

    def __init__(self, file: IO[str], receipt: Receipt, about: str) -> None:
        self._file = file
        file.write(json.dumps({**receipt.as_dict(), "about": about}) + "\n")

    def write(self, columns: Columns) -> None:
        values = [
            list(map(json.dumps, _values(each))) if _is_text(each) else _values(each) for each in columns.values()
        ]
        form = "{" + ", ".join(f"{json.dumps(name).replace('%', '%%')}: %s" for name in columns) + "}\n"
        self._file.writelines(form % line for line in zip(*values, strict=True))

    def close(self) -> None:
        pass


class ParquetWriter:
    """Numbers as int64 or double, labels as dictionaries, and `grain_sft` in the schema's metadata."""

    def __init__(self, file: IO[bytes], receipt: Receipt, about: str) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise MissingExtraError.of("format parquet", "pyarrow", "parquet") from error
        self._arrow, self._parquet, self._file = pyarrow, parquet, file
        self._metadata = {"grain_sft": json.dumps({**receipt.as_dict(), "about": about})}
        self._writer: Any = None

    def write(self, columns: Columns) -> None:
        table = self._arrow.table({name: self._array(column) for name, column in columns.items()})
        table = table.replace_schema_metadata(self._metadata)
        if self._writer is None:
            self._writer = self._parquet.ParquetWriter(self._file, table.schema, compression="zstd")
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is None:
            self.write({})
        self._writer.close()

    def _array(self, column: Column) -> Any:
        if isinstance(column, Labels):
            numbers = self._arrow.array(column.numbers, mask=column.numbers < 0)
            texts = self._arrow.array(column.texts, self._arrow.string())
            return self._arrow.DictionaryArray.from_arrays(numbers.cast(self._arrow.int32()), texts)
        return self._arrow.array(column)


WRITERS: dict[str, tuple[Callable[[Any, Receipt, str], Writer], bool]] = {
    "table": (TableWriter, False),
    "jsonl": (JsonlWriter, False),
    "csv": (CsvWriter, False),
    "parquet": (ParquetWriter, True),
}
"""Writers by name, and whether their files are binary."""


def _values(column: Column) -> list[Any]:
    if isinstance(column, Labels):
        texts = [*column.texts, ""]
        return [texts[number] for number in column.numbers.tolist()]
    return column.tolist() if isinstance(column, np.ndarray) else column


def _is_text(column: Column) -> bool:
    return isinstance(column, Labels) or (isinstance(column, list) and any(isinstance(each, str) for each in column))


def _cells(column: Column) -> list[str]:
    values = _values(column)
    if _is_text(column):
        return values
    if values and isinstance(values[0], float):
        return [f"{value:.4%}" for value in values]
    return ["-" if value == -1 else f"{value:,}" for value in values]
