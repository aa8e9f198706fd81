"""Parquet files of records, read by row groups."""

from collections.abc import Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, import_extra
from grain_sft.prepare.records.unpacked import Part
from grain_sft.storage import files, open_remote


def matches(path: str, head: bytes) -> bool:
    """Return whether a file is of Parquet, by its first bytes and its name."""
    return head.startswith(b"PAR1") or path.endswith(".parquet")


def parts(path: str, size: int) -> tuple[Part, ...]:
    """Return the number of rows of each row group, and for the hash an equal share of the file's `size` bytes."""
    metadata = _open(path).metadata
    count = metadata.num_row_groups
    return tuple(
        Part(size * group // count, size * (group + 1) // count, metadata.row_group(group).num_rows)
        for group in range(count)
    )


def rows(path: str, group: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of one row group."""
    try:
        for batch in _open(path).iter_batches(batch_size=1024, row_groups=[group]):
            for row in batch.to_pylist():
                yield _without_none(row)
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: row group {group} can't be read ({error}).") from error


def _open(path: str) -> Any:
    import_extra("pyarrow", f"{path}: reading Parquet", "pyarrow", "parquet")
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(open_remote(path) if files.is_remote(path) else path)
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read as Parquet ({error}).") from error


def _without_none(value: Any) -> Any:
    """Return a row as JSON has it, without the None that Parquet writes for absent keys."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
