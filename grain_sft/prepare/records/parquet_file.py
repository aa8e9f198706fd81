"""Reader of Parquet files of records, in parts. A part has the rows of a row group, or some rows of a large row group.

To reach the second part of a row group, the first must be decoded. So each thread continues where its last part ended.
"""

import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.arrow_file import errors_named, rows_of
from grain_sft.prepare.records.units import Input, Part, ReadReport, Unit
from grain_sft.storage import files, open_remote

PART_BYTES = 1 << 25  # most decompressed bytes of a part; pandas writes row groups of a million rows
_BATCH = 1024  # most rows decoded at once
_BUFFER = 1 << 22  # bytes of a column read at once


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is a Parquet file, by its first bytes or its name."""
    return head.startswith(b"PAR1") or path.endswith(".parquet")


def describe(path: str, size: int, min_bytes: int, report: ReadReport) -> tuple[tuple[Part, ...], str]:
    """Return the parts and the version of a file. See `inputs.ROW_FILES`.

    The rows of a part are not consecutive bytes. `start` and `stop` divide the file evenly: part 2 of 5 has the second fifth of
    the bytes. So the hashes of all parts cover the file.
    """
    version = _version(path)
    metadata = _open(path).metadata
    part_rows: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        num_parts = max(1, min(group.num_rows, -(-group.total_byte_size // PART_BYTES)))
        row_borders = [group.num_rows * part // num_parts for part in range(num_parts + 1)]
        part_rows += [stop - start for start, stop in itertools.pairwise(row_borders)]
    if sum(part_rows) != metadata.num_rows:
        raise CorpusFileError(f"{path}: has {sum(part_rows)} of {metadata.num_rows} rows. Write the file again.")
    offsets = [size * part // max(1, len(part_rows)) for part in range(len(part_rows) + 1)]
    return tuple(map(Part, offsets, offsets[1:], part_rows)), version


_reading = threading.local()
"""`_reading.rows`: at most one iterator over the rows of a file, by (path, version, number of the iterator's next row)."""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    _check_version(entry)
    iterators = getattr(_reading, "rows", {})
    _reading.rows = {}  # if this unit fails or is not read to its end, the next unit opens the file again
    stop = unit.first + unit.records
    with errors_named(f"{entry.path}: rows {unit.first} to {stop - 1} can't be read"):
        rows_left = iterators.get((entry.path, entry.note, unit.first)) or _rows_from(entry.path, unit.first - 1)
        yield from itertools.islice(rows_left, unit.records)
    _check_version(entry)
    _reading.rows = {(entry.path, entry.note, stop): rows_left}


def _rows_from(path: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file, from row `first` (counted from 0) to the end."""
    file = _open(path)
    skip = first  # number of rows before the next row to yield
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        missing = group.num_rows  # rows of the group that are not decoded yet
        if skip >= missing:
            skip -= missing
            continue
        rows_of_part = max(1, missing * PART_BYTES // max(1, group.total_byte_size))
        for batch in file.iter_batches(min(_BATCH, rows_of_part), [number]):
            yield from rows_of(batch.slice(skip))  # no rows if `skip` is beyond the batch
            skip = max(0, skip - batch.num_rows)
            missing -= batch.num_rows
        if missing:  # pyarrow yields the rows of damaged columns up to the damage
            raise ValueError(f"row group {number}: {missing} of its rows are missing")


def _check_version(entry: Input) -> None:
    """Refuse a file that is not the version that `describe` read."""
    if _version(entry.path) != entry.note:
        raise CorpusFileError(f"{entry.path}: changed while it was read. Start again.")


def _version(path: str) -> str:
    """Return the version of a remote file, or a local file's time of change."""
    if files.is_remote(path):
        return files.size_and_version(path)[1] or ""
    with files.reading(path):
        return str(os.stat(path).st_mtime_ns)


def _open(path: str) -> Any:
    """Return the `pyarrow.parquet.ParquetFile` of a local or remote file."""
    parquet = import_extra("pyarrow.parquet", f"{path}: reading Parquet", "pyarrow", "parquet")
    with errors_named(f"{path}: can't be read as Parquet"):
        source = open_remote(path) if files.is_remote(path) else path
        # pre_buffer=True would load a whole row group into memory
        return parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)
