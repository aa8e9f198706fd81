"""Parquet files of records, read by row groups. A large row group is several parts.

A part is reached by decoding the rows before it in its row group, so each thread reads a file forward, once.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.arrow_file import errors_named, rows_of
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.storage import files, open_remote

PART_BYTES = 1 << 25  # decompressed bytes of a part; pandas writes a million rows in one row group
_BATCH = 1024  # rows decoded at once
_BUFFER = 1 << 22  # bytes of a column read at once


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is a Parquet file, by its first bytes or its name."""
    return head.startswith(b"PAR1") or path.endswith(".parquet")


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return the parts and the version of a file. The bytes of each part are an equal share of the file, only to be hashed."""
    version, metadata = _version(path), _open(path).metadata
    rows: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        count = max(1, min(group.num_rows, -(-group.total_byte_size // PART_BYTES)))
        rows += [group.num_rows * (part + 1) // count - group.num_rows * part // count for part in range(count)]
    if sum(rows) != metadata.num_rows:
        found = f"{path}: {metadata.num_rows} rows by its footer, and {sum(rows)} in its row groups"
        raise CorpusFileError(f"{found}. It is damaged: write the file again.")
    shares = itertools.pairwise(size * part // max(1, len(rows)) for part in range(len(rows) + 1))
    return tuple(Part(*share, count) for share, count in zip(shares, rows, strict=True)), version


_reading = threading.local()
"""`_reading.rows`: path and version of the file that this thread reads, index of the next row, and an iterator from it on."""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    key, first = (entry.path, entry.note), unit.first - 1
    stop = first + unit.records
    _check_version(entry)
    open_file, position, following = getattr(_reading, "rows", None) or ((), 0, iter(()))
    _reading.rows = None  # after an error, begin again
    with errors_named(f"{entry.path}: rows {unit.first} to {stop} can't be read"):
        if (open_file, position) != (key, first):
            following = _rows_from(entry.path, first)
        yield from itertools.islice(following, unit.records)
    _check_version(entry)
    _reading.rows = (key, stop, following)


def _rows_from(path: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file from index `first` on."""
    file = _open(path)
    for group in range(file.metadata.num_row_groups):
        left = file.metadata.row_group(group).num_rows
        if first < left:
            for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group]):
                yield from rows_of(batch.slice(first))
                first, left = max(0, first - batch.num_rows), left - batch.num_rows
            if left:  # pyarrow yields the rows of damaged columns up to the damage
                raise ValueError(f"row group {group}: {left} of its rows are missing")
        first = max(0, first - left)


def _check_version(entry: Input) -> None:
    if _version(entry.path) != entry.note:
        raise CorpusFileError(f"{entry.path}: changed while it was read. Start again.")


def _version(path: str) -> str:
    """Return the version of a remote file, or the time of the last change of a local file."""
    if files.is_remote(path):
        return files.size_and_version(path)[1] or ""
    with files.reading(path):
        return str(os.stat(path).st_mtime_ns)


def _open(path: str) -> Any:
    parquet = import_extra("pyarrow.parquet", f"{path}: reading Parquet", "pyarrow", "parquet")
    with errors_named(f"{path}: can't be read as Parquet"):
        source = open_remote(path) if files.is_remote(path) else path
        return parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)  # else a whole row group is in memory
