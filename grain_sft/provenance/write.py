"""Writing columns, some at a time: as a table for people, JSON lines, CSV, or Parquet. Each says the receipt."""

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
    """A column of texts of which there are few: `texts[number]` for each of `numbers` (int64 [lines]), "" for -1."""

    numbers: npt.NDArray[np.int64]
    texts: Sequence[str]


Column = npt.NDArray[Any] | Labels | list[Any]
Columns = Mapping[str, Column]


class Writer(Protocol):
    """Takes columns of the same names and types, some lines at a time."""

    def write(self, columns: Columns) -> None:
        """Add lines: of each column as many."""
        ...


@contextlib.contextmanager
def open_writer(kind: str, output: str | None, receipt: Receipt, about: str) -> Iterator[Writer]:
    """A writer to the file `output`, which appears whole or not at all; None: to standard output.

    Args:
      kind: one of `WRITERS`.
      output: local path, or URL.
      receipt: of the pipeline. CSV and tables begin with a line `# <code> <about>`; JSON lines with an object of the
        receipt and its parts; a Parquet file has them in its metadata.
      about: what is written, in a few words.

    Raises:
      StorageError: the file can't be written.
      PipelineError: Parquet to standard output.
      MissingExtraError: Parquet without pyarrow.
    """
    make = WRITERS[kind]
    if output is None:
        if kind == "parquet":
            raise PipelineError("format parquet: is no text; name a file with --output.")
        yield make(sys.stdout, receipt, about)
        return
    with files.atomic_write(output, "wb" if kind == "parquet" else "w") as file:
        writer = make(file, receipt, about)
        yield writer
        if isinstance(writer, ParquetWriter):
            writer.close()


class TableWriter:
    """Columns aligned, numbers with thousands separators, "-" for -1."""

    def __init__(self, file: IO[str], receipt: Receipt, about: str) -> None:
        self._file = file
        self._widths: list[int] = []
        file.write(f"# {receipt.code} {about}\n")

    def write(self, columns: Columns) -> None:
        cells = [_cells(column) for column in columns.values()]
        head = not self._widths
        found = [max(map(len, column), default=0) for column in cells]
        self._widths = [
            max(widths) for widths in zip(found, map(len, columns), self._widths or [0] * len(found), strict=True)
        ]
        left = [_is_text(column) for column in columns.values()]
        padded = [
            [cell.ljust(width) if text else cell.rjust(width) for cell in ([name] if head else []) + column]
            for name, column, width, text in zip(columns, cells, self._widths, left, strict=True)
        ]
        self._file.writelines("  ".join(line).rstrip() + "\n" for line in zip(*padded, strict=True))


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


class JsonlWriter:
    """An object of receipt, parts and what follows; then an object a line."""

    def __init__(self, file: IO[str], receipt: Receipt, about: str) -> None:
        self._file = file
        file.write(json.dumps({**receipt.as_dict(), "about": about}) + "\n")

    def write(self, columns: Columns) -> None:
        values = [
            list(map(json.dumps, _values(column))) if _is_text(column) else _values(column)
            for column in columns.values()
        ]
        form = "{" + ", ".join(f"{json.dumps(name).replace('%', '%%')}: %s" for name in columns) + "}\n"
        self._file.writelines(form % line for line in zip(*values, strict=True))


class ParquetWriter:
    """Numbers as int64 or double, labels as dictionaries; `grain_sft` in the schema's metadata."""

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
        """Write the footer."""
        if self._writer is None:
            self.write({})
        self._writer.close()

    def _array(self, column: Column) -> Any:
        if isinstance(column, Labels):
            numbers = self._arrow.array(column.numbers, mask=column.numbers < 0)
            texts = self._arrow.array(column.texts, self._arrow.string())
            return self._arrow.DictionaryArray.from_arrays(numbers.cast(self._arrow.int32()), texts)
        return self._arrow.array(column)


WRITERS: dict[str, Callable[[Any, Receipt, str], Writer]] = {
    "table": TableWriter,
    "jsonl": JsonlWriter,
    "csv": CsvWriter,
    "parquet": ParquetWriter,
}


def _values(column: Column) -> list[Any]:
    if isinstance(column, Labels):
        texts = [*column.texts, ""]
        return [texts[number] for number in column.numbers.tolist()]
    return column.tolist() if isinstance(column, np.ndarray) else column


def _is_text(column: Column) -> bool:
    return isinstance(column, Labels) or (isinstance(column, list) and any(isinstance(each, str) for each in column))


def _cells(column: Column) -> list[str]:
    if _is_text(column):
        return _values(column)
    values = _values(column)
    if values and isinstance(values[0], float):
        return [f"{value:.4%}" for value in values]
    return ["-" if value == -1 else f"{value:,}" for value in values]
