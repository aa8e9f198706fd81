"""OpenChat's Parquet files as raw arrays, read a row group's pages at a time.

A row holds `seqlens` sequences, usually one. In the file, labels and weights are shifted one to the left, to the inputs;
here they are at their own tokens.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.loss import KINDS
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, MissingExtraError, shortened
from grain_sft.storage import describe, files, open_remote, read_whole

METADATA_KEY = "grain_sft"
"""Key in the metadata of the file's schema, whose value is the corpus.json of other formats."""

_ROWS = 1024  # decoded at once
_BUFFER = 1 << 20  # bytes of a column that are read at once
_LISTS = ("seqlens", "nz_input_ids", "nz_position_ids", "nz_shifted_label_ids", "nz_shifted_loss_weights")
_COLUMNS = ("total_length", "num_seqs", *_LISTS)
_FLOATS = ("num_seqs", "nz_shifted_loss_weights")

Ints = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """Some rows, with the values of all of them in one array for each column, and the number of values in each row."""

    first: int  # row number of the first, from 1
    lengths: dict[str, Ints]
    values: dict[str, npt.NDArray[Any]]


def stated_metadata(path: str, version: str | None) -> dict[str, Any] | None:
    """Return the metadata that `grain-sft prepare` wrote into the file; None for a file of another tool."""
    with _opened(path, version) as (_, file):
        raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY.encode(), b"null")
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def read_first_weights(path: str) -> npt.NDArray[np.float32] | None:
    """Return the weights of first tokens, float32 [documents]; None without a path."""
    if not path:
        return None
    data = read_whole(describe(path))
    if len(data) % 4:
        raise CorpusError(f"{path}: {len(data)} bytes is not a multiple of 4, the size of a float32. It was cut short.")
    weights: npt.NDArray[np.float32] = np.frombuffer(data, "<f4")
    wrong = np.flatnonzero(KINDS["float32"].wrong(weights, weights))
    if len(wrong):
        raise CorpusError(f"{path}: weight {wrong[0]} is {weights[wrong[0]]}; expected a finite number, 0 or more.")
    return weights


def unpack(
    path: str, version: str | None, first_weights: npt.NDArray[np.float32] | None, out: Sequence[IO[bytes]]
) -> int:
    """Write tokens, weights and documents of all rows to the three files `out`, and return the number of documents."""
    tokens = documents = 0
    for rows in _read_rows(path, version):
        _check(path, rows)
        length = rows.values["seqlens"].astype(np.int64)
        starts = np.cumsum(length) - length
        weights = np.zeros(int(length.sum()), "<f4")
        weights[1:] = rows.values["nz_shifted_loss_weights"][
            :-1
        ]  # a sequence's first gets the last before it, which is 0
        if first_weights is not None:
            mine = first_weights[documents : documents + len(length)]
            if len(mine) == len(length):  # else the caller reports it
                weights[starts[length > 0]] = mine[length > 0]
        out[0].write(rows.values["nz_input_ids"].astype("<u4").tobytes())
        out[1].write(weights.tobytes())
        out[2].write(np.stack([starts + tokens, length], axis=1).astype("<u8").tobytes())
        tokens += len(weights)
        documents += len(length)
    return documents


def _check(path: str, rows: _Rows) -> None:
    """Check that the columns of every row fit together."""
    values, counts = rows.values, rows.lengths["nz_input_ids"]

    def refuse(row: int, what: str) -> CorpusError:
        return CorpusError(f"{path}: row {rows.first + row}: {what}. The file is damaged, or not OpenChat's.")

    for name, found in {"total_length": values["total_length"], **rows.lengths}.items():
        wrong = np.flatnonzero(found != counts)
        if name != "seqlens" and len(wrong):
            what = f"{name} {'has the length' if name in _LISTS else 'is'} {found[wrong[0]]}"
            raise refuse(wrong[0], f"{what}, but nz_input_ids has the length {counts[wrong[0]]}")
    length = values["seqlens"].astype(np.int64)
    row_of = np.repeat(np.arange(len(counts)), rows.lengths["seqlens"])
    sums = np.bincount(row_of, weights=length, minlength=len(counts)).astype(np.int64)
    wrong = np.union1d(np.flatnonzero(sums != counts), row_of[length < 0])
    if len(wrong):
        what = f"seqlens add up to {sums[wrong[0]]}, but nz_input_ids has the length {counts[wrong[0]]}"
        raise refuse(wrong[0], what)
    starts = np.cumsum(length) - length
    ids, labels, weights = values["nz_input_ids"], values["nz_shifted_label_ids"], values["nz_shifted_loss_weights"]
    is_last = np.zeros(len(ids), np.bool_)
    is_last[(starts + length - 1)[length > 0]] = True
    positions = np.arange(len(ids)) - np.repeat(starts, length)
    not_weights = KINDS["float32"].wrong(weights.astype(np.float32), ids)
    for where, what in (
        (values["nz_position_ids"] != positions, "nz_position_ids don't count from 0 in a sequence"),
        ((ids < 0) | (ids >= 1 << 31), "nz_input_ids holds a token id that int32 tokens don't have"),
        (not_weights, "nz_shifted_loss_weights holds a weight that is negative or not finite"),
        (is_last & (weights != 0), "the last of nz_shifted_loss_weights is not 0, though no token follows it"),
        (
            (weights[:-1] != 0) & (labels[:-1] != ids[1:]),
            "a label of nz_shifted_label_ids takes loss, but is not the token that follows",
        ),
    ):
        if where.any():
            row = np.searchsorted(np.cumsum(counts), np.flatnonzero(where)[0], side="right")
            raise refuse(int(row), what)


@contextlib.contextmanager
def _opened(path: str, version: str | None) -> Iterator[tuple[Any, Any]]:
    """Open the file, and yield pyarrow and the file as pyarrow.parquet opens it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError.of(f"{path}: reading Parquet", "pyarrow", "parquet") from error
    opened: Any = open_remote(path, version) if files.is_remote(path) else pyarrow.OSFile(path)
    with opened as source:
        yield pyarrow, parquet.ParquetFile(source, buffer_size=_BUFFER, page_checksum_verification=True)


def _read_rows(path: str, version: str | None) -> Iterator[_Rows]:
    """Yield all rows, some at a time, after a check of the columns and their types."""
    first = 1
    try:
        with _opened(path, version) as (pyarrow, file):
            names = file.schema_arrow.names
            for name in _COLUMNS:
                if names.count(name) != 1:
                    raise CorpusError(
                        f"{path}: has {names.count(name)} columns {name}; expected the columns {', '.join(_COLUMNS)}."
                    )
            for group in range(file.num_row_groups):  # together they would be kept until the last is read
                for batch in file.iter_batches(_ROWS, [group], columns=list(_COLUMNS), use_threads=False):
                    yield _rows(pyarrow.types, path, first, batch)
                    first += batch.num_rows
    except GrainSftError:
        raise
    except FileNotFoundError as error:
        raise CorpusFileError(f"{path}: no such file.") from error
    except Exception as error:  # pyarrow raises kinds of its own, MemoryErrors and plain OSErrors for damaged files
        text = shortened(" ".join(str(error).split()) or type(error).__name__, 200)
        raise CorpusError(f"{path}: can't be read as Parquet after row {first - 1} ({text}).") from error


def _rows(types: Any, path: str, first: int, batch: Any) -> _Rows:
    rows = _Rows(first, {}, {})
    for name in _COLUMNS:
        column = inner = batch.column(batch.schema.get_field_index(name))
        if name in _LISTS:
            if not (types.is_list(column.type) or types.is_large_list(column.type)):
                raise CorpusError(f"{path}: column {name} is {column.type}; expected lists of numbers.")
            inner = column.flatten()
            rows.lengths[name] = column.value_lengths().fill_null(0).to_numpy().astype(np.int64)
        if not (types.is_integer(inner.type) or (name in _FLOATS and types.is_floating(inner.type))):
            raise CorpusError(f"{path}: column {name} holds {inner.type}; expected numbers, as OpenChat writes them.")
        if column.null_count or inner.null_count:
            raise CorpusError(f"{path}: column {name} has no value in some of the rows from {first} on; none may lack.")
        rows.values[name] = inner.to_numpy(zero_copy_only=False)
    return rows
