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

from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError, MissingExtraError, shortened
from grain_sft.storage import describe, files, open_remote, read_whole

METADATA_KEY = "grain_sft"
"""Key in the metadata of the file's schema, whose value is the corpus.json of other formats."""

_ROWS = 1024  # decoded at once
_BUFFER = 1 << 20  # bytes of a column that are read at once
_LISTS = ("seqlens", "nz_input_ids", "nz_position_ids", "nz_shifted_label_ids", "nz_shifted_loss_weights")
_COLUMNS = ("total_length", "num_seqs", *_LISTS)

Ints = npt.NDArray[np.int64]


class _Rows(NamedTuple):
    """Some rows, with the values of all of them in one array for each column."""

    first: int  # row number of the first, from 1
    total_length: Ints
    lengths: dict[str, Ints]  # of every row's list, by column
    values: dict[str, npt.NDArray[Any]]


def stated_metadata(path: str, version: str | None) -> dict[str, Any] | None:
    """Return the metadata that `grain-sft prepare` wrote into the file; None for a file of another tool."""
    with _opened(path, version) as (_, file):
        raw = (file.schema_arrow.metadata or {}).get(METADATA_KEY.encode())
    try:
        found = None if raw is None else json.loads(raw)
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
    wrong = ~np.isfinite(weights) | (weights < 0)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise CorpusError(f"{path}: weight {at} is {weights[at]}; expected a finite number, 0 or more.")
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
        weights = _unshifted(path, rows, starts, length)
        if first_weights is not None:
            mine = first_weights[documents : documents + len(length)]
            if len(mine) == len(length):  # else the caller reports it
                weights[starts[length > 0]] = mine[length > 0]
        out[0].write(rows.values["nz_input_ids"].astype("<u4").tobytes())
        out[1].write(weights.astype("<f4").tobytes())
        out[2].write(np.stack([starts + tokens, length], axis=1).astype("<u8").tobytes())
        tokens += int(length.sum())
        documents += len(length)
    return documents


def _unshifted(path: str, rows: _Rows, starts: Ints, length: Ints) -> npt.NDArray[np.float32]:
    """Return the weights of the tokens themselves, 0 for the first of each sequence."""
    ids, labels = rows.values["nz_input_ids"], rows.values["nz_shifted_label_ids"]
    shifted = rows.values["nz_shifted_loss_weights"].astype(np.float32)
    lasts = (starts + length - 1)[length > 0]
    _refuse(
        path,
        rows,
        ~np.isfinite(shifted) | (shifted < 0),
        "nz_shifted_loss_weights holds a weight that is negative or not finite",
    )
    at_end = np.zeros(len(shifted), np.bool_)
    at_end[lasts] = shifted[lasts] != 0
    _refuse(path, rows, at_end, "the last of nz_shifted_loss_weights is not 0, though no token follows it")
    wrong = np.zeros(len(shifted), np.bool_)
    wrong[:-1] = (shifted[:-1] != 0) & (labels[:-1] != ids[1:])
    _refuse(path, rows, wrong, "a label of nz_shifted_label_ids takes loss, but is not the token that follows")
    weights = np.zeros(len(shifted), np.float32)
    weights[1:] = shifted[:-1]
    return weights  # the first of a sequence got the last of the one before, which is 0


def _check(path: str, rows: _Rows) -> None:
    """Check that the columns of every row fit together."""
    counts = rows.lengths["nz_input_ids"]
    for name in ("total_length", *_LISTS[2:]):
        found = rows.total_length if name == "total_length" else rows.lengths[name]
        wrong = np.flatnonzero(found != counts)
        if len(wrong):
            row = int(wrong[0])
            verb = "is" if name == "total_length" else "has the length"
            raise CorpusError(
                f"{path}: row {rows.first + row}: {name} {verb} {found[row]}, but nz_input_ids has the length {counts[row]}."
            )
    length = rows.values["seqlens"].astype(np.int64)
    row_of = np.repeat(np.arange(len(counts)), rows.lengths["seqlens"])
    sums = np.bincount(row_of, weights=length, minlength=len(counts)).astype(np.int64)
    wrong = np.flatnonzero(sums != counts)
    if (length < 0).any() or len(wrong):
        row = int(row_of[np.flatnonzero(length < 0)[0]]) if (length < 0).any() else int(wrong[0])
        raise CorpusError(
            f"{path}: row {rows.first + row}: seqlens add up to {sums[row]}, but nz_input_ids has the length {counts[row]}."
        )
    starts = np.cumsum(length) - length
    positions = np.arange(int(length.sum())) - np.repeat(starts, length)
    _refuse(path, rows, rows.values["nz_position_ids"] != positions, "nz_position_ids don't count from 0 in a sequence")
    ids = rows.values["nz_input_ids"]
    _refuse(path, rows, (ids < 0) | (ids >= 1 << 31), "nz_input_ids holds a token id that int32 tokens don't have")


def _refuse(path: str, rows: _Rows, wrong: npt.NDArray[np.bool_], what: str) -> None:
    if wrong.any():
        token = int(np.flatnonzero(wrong)[0])
        row = int(np.searchsorted(np.cumsum(rows.lengths["nz_input_ids"]), token, side="right"))
        raise CorpusError(f"{path}: row {rows.first + row}: {what}. The file is damaged, or not OpenChat's.")


@contextlib.contextmanager
def _opened(path: str, version: str | None) -> Iterator[tuple[Any, Any]]:
    """Open the file, and yield pyarrow and the file as pyarrow.parquet opens it."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError.of(f"{path}: reading Parquet", "pyarrow", "parquet") from error
    with contextlib.ExitStack() as stack:
        if files.is_remote(path):
            source: Any = stack.enter_context(open_remote(path, version))
        else:
            source = stack.enter_context(pyarrow.OSFile(path))
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
                        f"{path}: has {names.count(name)} columns {name}; expected the columns {', '.join(_COLUMNS)}, each "
                        "once. It is not of OpenChat's generate_dataset."
                    )
            for group in range(file.num_row_groups):  # together they would be kept until the last is read
                for batch in file.iter_batches(_ROWS, [group], columns=list(_COLUMNS), use_threads=False):
                    yield _rows(pyarrow, path, first, batch)
                    first += batch.num_rows
    except GrainSftError:
        raise
    except FileNotFoundError as error:
        raise CorpusFileError(f"{path}: no such file.") from error
    except Exception as error:  # pyarrow raises kinds of its own, MemoryErrors and plain OSErrors for damaged files
        raise CorpusError(f"{path}: can't be read as Parquet after row {first - 1} ({_line(error)}).") from error


def _rows(pyarrow: Any, path: str, first: int, batch: Any) -> _Rows:
    lengths: dict[str, Ints] = {}
    values: dict[str, npt.NDArray[Any]] = {}
    for name in _COLUMNS:
        column = batch.column(batch.schema.get_field_index(name))
        inner = column
        if name in _LISTS:
            if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
                raise CorpusError(f"{path}: column {name} is {column.type}; expected lists of numbers.")
            inner = column.flatten()
        kind = inner.type
        number = pyarrow.types.is_integer(kind)
        if name in ("num_seqs", "nz_shifted_loss_weights"):
            number = number or pyarrow.types.is_floating(kind)
        if not number:
            raise CorpusError(f"{path}: column {name} holds {kind}; expected numbers, as OpenChat writes them.")
        if column.null_count or inner.null_count:
            raise CorpusError(
                f"{path}: column {name} has no value in some of the rows from {first} on; none may be missing."
            )
        if name in _LISTS:
            lengths[name] = column.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        values[name] = inner.to_numpy(zero_copy_only=False)
    return _Rows(first, values["total_length"].astype(np.int64), lengths, values)


def _line(error: Exception) -> str:
    return shortened(" ".join(str(error).split()) or type(error).__name__, 200)
