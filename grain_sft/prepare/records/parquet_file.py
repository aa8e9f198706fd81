"""Parquet files of records, read by row groups."""

from collections.abc import Callable, Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.arrow_file import rows_of
from grain_sft.prepare.records.units import Input, Part, Unit
from grain_sft.storage import files, open_remote


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is of Parquet, by its first bytes and its name."""
    return head.startswith(b"PAR1") or path.endswith(".parquet")


def describe(path: str, size: int, least: int, read: Callable[[int], None]) -> tuple[tuple[Part, ...], str]:
    """Return the number of rows of each row group, and for the hash an equal share of the file's `size` bytes."""
    metadata = _open(path).metadata
    count = metadata.num_row_groups
    parts = (
        Part(size * group // count, size * (group + 1) // count, metadata.row_group(group).num_rows)
        for group in range(count)
    )
    return tuple(parts), ""


def rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    """Yield the rows of a unit, which is a row group."""
    try:
        for batch in _open(entry.path).iter_batches(batch_size=1024, row_groups=[unit.part]):
            yield from rows_of(batch)
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{entry.path}: row group {unit.part} can't be read ({error}).") from error


def _open(path: str) -> Any:
    import_extra("pyarrow", f"{path}: reading Parquet", "pyarrow", "parquet")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(open_remote(path) if files.is_remote(path) else path)
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read as Parquet ({error}).") from error
