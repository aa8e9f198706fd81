"""Inputs: files of conversations, cut into units that can be read in any order and on any machine.

A JSONL file is cut every few MiB; a line belongs to the unit in which its first byte is. A Parquet file is cut at its
row groups. Where the cuts are depends on the files alone, and no output depends on the cuts.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grain_sft import files
from grain_sft.errors import CorpusFileError, MissingExtraError, PrepareError, RecordError
from grain_sft.prepare.request import check_name

BLOCK = 1 << 20  # bytes
MAX_BLOCKS = 8  # of a unit
MANY_BLOCKS = 1024  # an input of more gets units of more than one block
MAX_LINE = 1 << 28  # bytes; a longer record is a mistake

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_COMPRESSED = (".gz", ".zst", ".bz2", ".xz")


@dataclasses.dataclass(frozen=True)
class Input:
    """One file: its dataset's number, path, bytes, kind ("jsonl" or "parquet"), and row groups of a Parquet file."""

    dataset: int
    path: str
    size: int
    kind: str
    row_groups: tuple[int, ...] = ()  # rows of each


@dataclasses.dataclass(frozen=True)
class Unit:
    """Consecutive records of one input: bytes `start` to `stop` of JSONL, or row groups `start` to `stop`."""

    number: int
    input: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class Scan:
    """What a first look at a unit finds: its records (lines), and the hash of its bytes."""

    records: int
    digest: str


def list_inputs(datasets: Sequence[Sequence[str]]) -> list[Input]:
    """The files of every dataset, which are paths, globs and directories, local or remote, in that order.

    Raises:
      CorpusFileError: a path that names no file.
      PrepareError: a file of a kind that can't be read.
    """
    found = []
    for number, paths in enumerate(datasets):
        for path in paths:
            for name in _expand(files.normalize(path)):
                found.append(_describe(number, name))
    return found


def plan_units(inputs: Sequence[Input]) -> list[Unit]:
    """The units of all inputs, in order."""
    units: list[Unit] = []
    for number, entry in enumerate(inputs):
        if entry.kind == "parquet":
            cuts = range(len(entry.row_groups) + 1)
        else:
            blocks = -(-entry.size // BLOCK)
            step = BLOCK * max(1, min(MAX_BLOCKS, -(-blocks // MANY_BLOCKS)))
            cuts = range(0, entry.size + step, step)
        for start, stop in itertools.pairwise(cuts):
            stop = stop if entry.kind == "parquet" else min(stop, entry.size)
            units.append(Unit(len(units), number, start, stop))
    return units


def scan_unit(entry: Input, unit: Unit) -> Scan:
    """Count the records that begin in a unit, and hash it."""
    if entry.kind == "parquet":
        return Scan(sum(entry.row_groups[unit.start : unit.stop]), _hash_part(entry, unit))
    before = min(1, unit.start)
    data = files.read_range(entry.path, unit.start - before, unit.stop)
    if len(data) != unit.stop - unit.start + before:
        raise CorpusFileError(f"{entry.path}: was cut short while it was read (expected {entry.size} bytes).")
    starts = data.count(b"\n", 0, len(data) - 1) + (0 if before else 1)
    return Scan(starts, hashlib.sha256(memoryview(data)[before:]).hexdigest())


def digests(units: Sequence[Unit], scans: Sequence[Scan], inputs: Sequence[Input]) -> list[str]:
    """A hash of each input's content: SHA-256 over those of its units."""
    parts: list[list[str]] = [[] for _ in inputs]
    for unit, scan in zip(units, scans, strict=True):
        parts[unit.input].append(scan.digest)
    return [hashlib.sha256("\n".join(part).encode()).hexdigest() for part in parts]


def read_records(entry: Input, unit: Unit, first: int) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """(line or row number from 1, line without its end or row) of each record of a unit; blank lines are left out.

    Args:
      first: number of the unit's first record.

    Raises:
      CorpusFileError: the file can't be read, or changed meanwhile.
      RecordError: a line of more than 256 MiB.
    """
    if entry.kind == "parquet":
        yield from enumerate(_parquet_rows(entry, unit), first)
        return
    data = _lines_of(entry, unit)
    number, position = first, 0
    if not unit.start and data.startswith(b"\xef\xbb\xbf"):
        position = 3
    while position < len(data):
        end = data.find(b"\n", position)
        end = len(data) if end < 0 else end
        line = data[position:end].rstrip(b"\r")
        if len(line) > MAX_LINE:
            raise RecordError(f"{entry.path}:{number}: a line of {len(line)} bytes; expected at most {MAX_LINE}.")
        if line.strip():
            yield number, line
        number, position = number + 1, end + 1


def all_records(entries: Sequence[Input]) -> Iterator[tuple[Input, int, bytes | dict[str, Any]]]:
    """(input, line or row number from 1, line or row) of each record of all inputs, in order, as `read_records` gives them.

    Raises:
      CorpusFileError: a file can't be read, or changed meanwhile.
      RecordError: a line of more than 256 MiB.
    """
    first = [1] * len(entries)
    for unit in plan_units(entries):
        entry = entries[unit.input]
        for number, raw in read_records(entry, unit, first[unit.input]):
            yield entry, number, raw
        first[unit.input] += scan_unit(entry, unit).records


def _lines_of(entry: Input, unit: Unit) -> bytes:
    """The bytes of the lines that begin in a unit: from its first line's start to its last line's end."""
    before = min(1, unit.start)
    data = files.read_range(entry.path, unit.start - before, unit.stop)
    start = 0
    if before:
        start = data.find(b"\n", 0, len(data) - 1) + 1
        if not start:
            return b""  # a line goes on through all of it
    stop = unit.stop
    tail = [data[start:] if start else data]
    while not tail[-1].endswith(b"\n") and stop < entry.size:
        more = files.read_range(entry.path, stop, min(stop + BLOCK, entry.size))
        if not more:
            raise CorpusFileError(f"{entry.path}: was cut short while it was read (expected {entry.size} bytes).")
        end = more.find(b"\n") + 1
        tail.append(more[:end] if end else more)
        stop += len(more)
        if sum(map(len, tail)) > MAX_LINE + unit.stop - unit.start:
            break  # read_records says that it is too long
    return b"".join(tail)


def _expand(path: str) -> list[str]:
    if glob.has_magic(path) and (files.is_remote(path) or not os.path.exists(path)):
        found = files.glob(path)
    elif files.is_remote(path):
        with files.remote(path) as client:
            folder = client.isdir(path)
        within = files.glob(path.rstrip("/") + "/*") if folder else []
        found = [name for name in within if name.endswith(_SUFFIXES)] if folder else [path]
    elif os.path.isdir(path):
        found = sorted(str(name) for name in Path(path).iterdir() if name.is_file() and name.suffix in _SUFFIXES)
    else:
        found = [path]
    if not found:
        raise CorpusFileError(
            f"{path}: names no file. Expected .jsonl or .parquet files, a glob or a directory of them."
        )
    return found


def _describe(dataset: int, path: str) -> Input:
    check_name("input", path)
    if path.endswith(_COMPRESSED):
        raise PrepareError(
            f"{path}: is compressed, and can't be read from the middle. Decompress it first (gunzip -k, zstd -d, ...)."
        )
    size = files.size(path)
    if not files.is_remote(path) and not os.path.isfile(path):
        raise CorpusFileError(f"{path}: is no regular file.")
    if path.endswith(".parquet"):
        return Input(dataset, path, size, "parquet", _row_groups(path))
    return Input(dataset, path, size, "jsonl")


def _parquet(path: str) -> Any:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise MissingExtraError.of(f"{path}: reading Parquet", "pyarrow", "parquet") from error
    try:
        if files.is_remote(path):
            return parquet.ParquetFile(files.filesystem(path).open(path, "rb"))
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise CorpusFileError(f"{path}: can't be read as Parquet ({error}).") from error


def _row_groups(path: str) -> tuple[int, ...]:
    metadata = _parquet(path).metadata
    return tuple(metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))


def _hash_part(entry: Input, unit: Unit) -> str:
    """Hash of a Parquet file's bytes: each of its units has an equal share, which need not be that of its rows."""
    parts = max(1, len(entry.row_groups))
    start, stop = (entry.size * place // parts for place in (unit.start, unit.stop))
    whole = hashlib.sha256()
    for position in range(start, stop, BLOCK):
        whole.update(files.read_range(entry.path, position, min(position + BLOCK, stop)))
    return whole.hexdigest()


def _parquet_rows(entry: Input, unit: Unit) -> Iterator[dict[str, Any]]:
    table = _parquet(entry.path)
    for group in range(unit.start, unit.stop):
        try:
            batches = table.iter_batches(batch_size=1024, row_groups=[group])
            for batch in batches:
                for row in batch.to_pylist():
                    yield _without_none(row)
        except (OSError, ValueError) as error:
            raise CorpusFileError(f"{entry.path}: row group {group} can't be read ({error}).") from error


def _without_none(value: Any) -> Any:
    """A row as JSON would have it: Parquet has every key of a struct in every row, None where it is not there."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value
