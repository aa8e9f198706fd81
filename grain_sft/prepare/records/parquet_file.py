"""Parquet files of records, read by row groups."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

from grain_sft.errors import CorpusFileError, MissingExtraError
from grain_sft.storage import files, open_remote

_BLOCK = 1 << 20  # bytes


def row_groups(path: str) -> tuple[int, ...]:
    """Return the number of rows of each row group."""
    metadata = _open(path).metadata
    return tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))


def rows(path: str, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of row groups `start` to `stop`."""
    table = _open(path)
    for group in range(start, stop):
        try:
            for batch in table.iter_batches(batch_size=1024, row_groups=[group]):
                for row in batch.to_pylist():
                    yield _without_none(row)
        except (OSError, ValueError) as error:
            raise CorpusFileError(f"{path}: row group {group} can't be read ({error}).") from error


def hash_part(path: str, size: int, num_groups: int, start: int, stop: int) -> str:
    """Return the SHA-256 of an equal share of a file's bytes for each of the row groups `start` to `stop`."""
    begin, end = (size * place // max(1, num_groups) for place in (start, stop))
    whole = hashlib.sha256()
    for position in range(begin, end, _BLOCK):
        whole.update(files.read_range(path, position, min(position + _BLOCK, end)))
    return whole.hexdigest()


def _open(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError.of(f"{path}: reading Parquet", "pyarrow", "parquet") from error
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
