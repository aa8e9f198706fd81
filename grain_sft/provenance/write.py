"""Output of `trace` as an aligned table, CSV, JSON lines or Parquet, with the run's receipt."""

import contextlib
import csv
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NamedTuple

import numpy as np

from grain_sft.errors import PipelineError, import_extra
from grain_sft.pipeline import Receipt
from grain_sft.storage import files
from grain_sft.types import Array, Ints

SUFFIXES = {".csv": "csv", ".jsonl": "jsonl", ".parquet": "parquet"}
"""Name of the writer for a file, by its suffix."""


class Labels(NamedTuple):
    """Column of texts that repeat. Each text is stored once.

    Attributes:
      numbers: int64 [lines], index in `texts`; -1 for the text "".
      texts: Texts that the lines may have.
    """

    numbers: Ints
    texts: Sequence[str]


Column = Array | Labels | list[Any]
"""Values of a column, one for each line. A list has texts or numbers."""
Columns = Mapping[str, Column]
Writer = Callable[[Columns], None]
"""Function that appends lines, given as columns, to a file. Every call must have columns of the same names and types."""


@contextlib.contextmanager
def open_writer(kind: str, output: str | None, receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a `Writer` of a file. The file appears under its name when the context ends without an error.

    Args:
      kind: Name of one of `WRITERS`.
      output: Local path or URL; None or "" for standard output.
      receipt: Receipt of the pipeline. CSV and tables begin with a line `# <code> <about>`. For JSON lines, the first
        line is an object with the receipt, its parts and `about`. A Parquet file has this object in its metadata.
      about: Description of the lines, in a few words.

    Raises:
      StorageError: The file can't be written.
      PipelineError: The format is binary, and no file is named.
      MissingExtraError: Parquet needs pyarrow, which is not installed.
    """
    make, binary = WRITERS[kind]
    if binary and not output:
        raise PipelineError(f"format {kind}: expected a file, because the format is not text. Give --output FILE.")
    target: Any = files.atomic_write(output, "wb" if binary else "w") if output else contextlib.nullcontext(sys.stdout)
    with target as file, make(file, receipt, about) as write:
        yield write


@contextlib.contextmanager
def _table(file: IO[str], receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a writer of aligned columns, which become wider as needed."""
    file.write(f"# {receipt.code} {about}\n")
    widths: dict[str, int] = {}

    def write(columns: Columns) -> None:
        """Write the columns as aligned lines. Each call may widen the columns; the first call also writes their names."""
        is_first_call = not widths
        aligned_columns = []
        for name, column in columns.items():
            cells = _cells(column)
            widths[name] = max(widths.get(name, len(name)), *map(len, cells), 0)
            if is_first_call:
                cells = [name, *cells]
            align = str.ljust if _is_text(column) else str.rjust
            aligned_columns.append([align(cell, widths[name]) for cell in cells])
        file.writelines("  ".join(line).rstrip() + "\n" for line in zip(*aligned_columns, strict=True))

    yield write


@contextlib.contextmanager
def _csv(file: IO[str], receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a writer of CSV."""
    file.write(f"# {receipt.code} {about}\n")
    head: list[str] = []
    writer = csv.writer(file, lineterminator="\n")

    def write(columns: Columns) -> None:
        if not head:
            head.extend(columns)
            writer.writerow(head)
        writer.writerows(zip(*map(_values, columns.values()), strict=True))

    yield write


@contextlib.contextmanager
def _jsonl(file: IO[str], receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a writer of JSON lines."""
    file.write(json.dumps({**receipt.as_dict(), "about": about}) + "\n")

    def cells(column: Column) -> list[Any]:
        values = _values(column)
        return list(map(json.dumps, values)) if _is_text(column) else values

    def write(columns: Columns) -> None:
        # One format string for all lines takes 0.7 s for 200,000 lines of 13 columns; json.dumps of each line takes 2.2 s.
        form = "{" + ", ".join(f"{json.dumps(name).replace('%', '%%')}: %s" for name in columns) + "}\n"
        file.writelines(form % line for line in zip(*map(cells, columns.values()), strict=True))

    yield write


@contextlib.contextmanager
def _parquet(file: IO[bytes], receipt: Receipt, about: str) -> Iterator[Writer]:
    """Yield a writer of Parquet, in which `Labels` are dictionary columns."""
    pyarrow = import_extra("pyarrow", "format parquet", "pyarrow", "parquet")
    from pyarrow import parquet

    metadata = {"grain_sft": json.dumps({**receipt.as_dict(), "about": about})}
    writers: list[Any] = []  # one, made by the first `write`, which knows the columns

    def array(column: Column) -> Any:
        if not isinstance(column, Labels):
            return pyarrow.array(column)
        numbers = pyarrow.array(column.numbers, mask=column.numbers < 0).cast(pyarrow.int32())
        texts = pyarrow.array(list(map(_utf8, column.texts)), pyarrow.string())
        return pyarrow.DictionaryArray.from_arrays(numbers, texts)

    def write(columns: Columns) -> None:
        table = pyarrow.table({name: array(column) for name, column in columns.items()}, metadata=metadata)
        if not writers:
            writers.append(parquet.ParquetWriter(file, table.schema, compression="zstd"))
        writers[0].write_table(table)

    yield write
    if not writers:
        write({})  # no lines were written: this makes a valid file without columns
    writers[0].close()


WRITERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "table": (_table, False),
    "jsonl": (_jsonl, False),
    "csv": (_csv, False),
    "parquet": (_parquet, True),
}
"""For each name: the function that opens a writer, and whether the file is binary."""


def _values(column: Column) -> list[Any]:
    """Return a column as a list. `Labels` become their texts."""
    if isinstance(column, Labels):
        texts = [*map(_utf8, column.texts), ""]
        return [texts[number] for number in column.numbers.tolist()]
    return column.tolist() if isinstance(column, np.ndarray) else column


def _utf8(text: str) -> str:
    """Return a text that UTF-8 can encode. The byte FF in the name of a file, which is not UTF-8, becomes `\\udcff`."""
    return text.encode(errors="backslashreplace").decode()


def _is_text(column: Column) -> bool:
    return isinstance(column, Labels) or (isinstance(column, list) and any(isinstance(each, str) for each in column))


def _cells(column: Column) -> list[str]:
    """Return the table cells of a column. Floats are shares, printed in percent. -1 is an unknown number, printed as "-"."""
    values = _values(column)
    if _is_text(column):
        return values
    if values and isinstance(values[0], float):
        return [f"{value:.4%}" for value in values]
    return ["-" if value == -1 else f"{value:,}" for value in values]
