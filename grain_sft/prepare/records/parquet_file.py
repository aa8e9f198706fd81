"""Parquet files of records, read by row groups, and a large row group by several parts of it.

The rows of a part are reached by decoding those before it in the row group, so a process reads it forward, once.
"""

import itertools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.arrow_file import rows_of
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.storage import files, open_remote

PART_BYTES = 1 << 25  # decompressed, of a row group; pandas writes a million rows in one
_BATCH = 1024  # rows
_BUFFER = 1 << 22  # bytes that are read of a column at once


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is of Parquet, by its first bytes and its name."""
    return head.startswith(b"PAR1") or path.endswith(".parquet")


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return the parts and the version of a file. The bytes of a part are an equal share of `size`, for its hash alone."""
    version, metadata = _version(path), _open(path).metadata
    rows: list[int] = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        count = max(1, min(group.num_rows, -(-group.total_byte_size // PART_BYTES)))
        rows += [group.num_rows * (part + 1) // count - group.num_rows * part // count for part in range(count)]
    shares = itertools.pairwise(size * part // max(1, len(rows)) for part in range(len(rows) + 1))
    return tuple(Part(*share, count) for share, count in zip(shares, rows, strict=True)), version


_reading = threading.local()
"""Its `rows`: name of the file that this thread reads, number of the next row, and an iterator from there on."""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit."""
    name, first = (entry.path, entry.note), unit.first - 1
    _check_version(entry)
    known, position, following = getattr(_reading, "rows", None) or ((), 0, iter(()))
    _reading.rows = None  # after an error, begin again
    try:
        if known != name or position != first:
            following = _rows_from(entry.path, first)
        yield from itertools.islice(following, unit.records)
    except (OSError, ValueError) as error:
        where = f"rows {unit.first} to {first + unit.records}"
        raise CorpusFileError(f"{entry.path}: {where} can't be read ({error}).") from error
    _check_version(entry)
    _reading.rows = (name, first + unit.records, following)


def _rows_from(path: str, first: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file from number `first`, from 0."""
    file = _open(path)
    for group in range(file.metadata.num_row_groups):
        count = file.metadata.row_group(group).num_rows
        if first < count:
            for batch in file.iter_batches(batch_size=_BATCH, row_groups=[group]):
                yield from rows_of(batch.slice(first))
                first = max(0, first - batch.num_rows)
        first = max(0, first - count)


def _check_version(entry: Input) -> None:
    if _version(entry.path) != entry.note:
        raise CorpusFileError(f"{entry.path}: changed while it was read. Start again.")


def _version(path: str) -> str:
    """Return the version of a file: of a local one, the time of its last change."""
    if files.is_remote(path):
        return files.size_and_version(path)[1] or ""
    with files.reading(path):
        return str(os.stat(path).st_mtime_ns)


def _open(path: str) -> Any:
    import_extra("pyarrow", f"{path}: reading Parquet", "pyarrow", "parquet")
    from pyarrow import parquet

    try:
        source = open_remote(path) if files.is_remote(path) else path
        return parquet.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)  # else a whole row group is in memory
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read as Parquet ({error}).") from error
