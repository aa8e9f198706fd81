"""Inputs of a preparation: files of records, cut into units that can be read in any order and on any machine.

A file of plain lines (uncompressed JSONL) is cut every 1 to 8 MiB. A line belongs to the unit that has the line's first byte.
Other files are cut between records. The corpus does not depend on the cuts. A `Part` is a range of one file, and a `Unit` is a
part with the number of its input and of its first record.
"""

import dataclasses
import hashlib
import itertools
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from grain_sft.errors import CorpusFileError, RecordError
from grain_sft.prepare.records import array_record_file, arrow_file, decompression, parquet_file, text_files, walk
from grain_sft.prepare.records.strict_json import check_name, decoded
from grain_sft.prepare.records.units import BLOCK, Input, Part, ReadReport, Unit, check_digest, read_exactly
from grain_sft.progress import Progress
from grain_sft.storage import file_stamp, files, in_threads

MAX_BLOCKS = 8  # number of blocks of 1 MiB: at most in a unit of plain lines, and at least in most parts of other files
MANY_BLOCKS = 1024  # number of units of 1 MiB in a file of plain lines; a file of 1 to 2 GiB has units of 2 MiB, and so on
_TAIL = 1 << 14  # bytes of the first read after a unit, to find the end of the unit's last line
GROUP_BYTES = 1 << 18  # maximum number of bytes of a group of several units

SCAN_THREADS = 8  # threads that open and scan files

ROW_FILES: Mapping[str, ModuleType] = {"parquet": parquet_file, "arrow": arrow_file, "array_record": array_record_file}
"""Modules for the kinds of files whose records are rows. Each module has three functions:

- `matches(path, head)` returns whether a file is of this kind.
- `describe(path, size, min_bytes, report)` returns the `parts` and the `note` of the file's `Input`. Each part except the last
  has at least `min_bytes` bytes of records. Parquet ignores `min_bytes` and `report`.
- `rows(entry, unit)` yields the rows of a unit.
"""


def list_inputs(datasets: Sequence[Sequence[str]], progress: Progress | None = None) -> list[Input]:
    """Return the files of every dataset, in order.

    All files except Parquet and uncompressed JSONL are read whole, to find where they can be cut.

    Args:
      datasets: Paths, globs and folders of each dataset, local or remote.
      progress: Function that is called as `progress("Opening the inputs", bytes_read, all_bytes)`, by one thread at a time.

    Raises:
      CorpusFileError: A path names no file, or a file is damaged.
      PrepareError: A file is of a kind that can't be read.
    """
    sized_paths = _sized_paths(datasets)
    total = sum(size for _, _, size in sized_paths)
    all_read = 0  # bytes read of all files
    lock = threading.Lock()

    def describe(number: int) -> Input:
        """Return the input of one file, with its parts."""

        read = 0  # bytes read of this file

        def report(position: int) -> None:
            nonlocal all_read, read
            with lock:
                all_read, read = all_read + position - read, position
                if progress is not None:
                    progress("Opening the inputs", all_read, total)

        entry, parts = _describe(*sized_paths[number], report)
        entry = dataclasses.replace(entry, parts=tuple(parts))
        report(entry.size)
        return entry

    return list(in_threads(describe, range(len(sized_paths)), threads=SCAN_THREADS))


def _sized_paths(datasets: Sequence[Sequence[str]]) -> list[tuple[int, str, int]]:
    """Return (number of the dataset, path, size) of each file. Refuse a file that is named twice."""
    paths = [(dataset, path) for dataset, names in enumerate(datasets) for name in names for path in walk.expand(name)]
    sizes = list(in_threads(_size, [path for _, path in paths], threads=SCAN_THREADS))
    seen: set[str] = set()
    for _, path in paths:
        real = files.real_path(path)
        if real in seen:
            raise CorpusFileError(f"{path}: is named twice. Name it once, with amount 2.0 to use its records twice.")
        seen.add(real)
    return [(dataset, path, size) for (dataset, path), size in zip(paths, sizes, strict=True)]


def plan_units(inputs: Sequence[Input]) -> list[Unit]:
    """Return the units of all inputs, in order."""
    units: list[Unit] = []
    for number, entry in enumerate(inputs):
        for part in entry.parts:
            units.append(Unit(part.start, part.stop, part.records, part.digest, len(units), number))
    return units


def scan_unit(entry: Input, unit: Unit) -> Unit:
    """Return `unit` with its number of records and the hash of its bytes."""
    if unit.digest:  # the reader that cut the file has counted and hashed the unit
        return unit
    data, own_data = _read_unit(entry, unit)
    # `data` also has the byte before the unit. A line begins at byte 0 of the file, and after each newline in `data`, except
    # one that is its last byte. Only plain lines are counted here; a unit of another kind lacks only the hash.
    records = data.count(b"\n", 0, len(data) - 1) + (unit.start == 0) if entry.kind == "jsonl" else unit.records
    return dataclasses.replace(unit, records=records, digest=hashlib.sha256(own_data).hexdigest())


def assemble(inputs: Sequence[Input], units: Iterable[Unit]) -> tuple[tuple[Input, ...], tuple[Unit, ...]]:
    """Return the inputs and the units, completed.

    An input gets `records` and `digest`, and loses its `parts`. A unit gets `first`, the number of its first record.
    """
    units_of_inputs: list[list[Unit]] = [[] for _ in inputs]
    for unit in units:
        units_of_inputs[unit.input].append(unit)
    scanned, placed = [], []
    for entry, own_units in zip(inputs, units_of_inputs, strict=True):
        # numbers of the first record of each unit, and the number after the last record
        *firsts, end = itertools.accumulate((unit.records for unit in own_units), initial=1)
        digest = hashlib.sha256("\n".join(unit.digest for unit in own_units).encode()).hexdigest()
        scanned.append(dataclasses.replace(entry, parts=(), records=end - 1, digest=digest))
        placed += [dataclasses.replace(unit, first=first) for unit, first in zip(own_units, firsts, strict=True)]
    return tuple(scanned), tuple(placed)


def grouped(inputs: Sequence[Input], units: Sequence[Unit]) -> tuple[tuple[Unit, ...], ...]:
    """Divide the units into groups: consecutive units of one dataset, of at most `GROUP_BYTES` in total, or one larger unit.

    Each group is rendered to one chunk file, so that thousands of small inputs become few files.
    """
    groups: list[list[Unit]] = []
    for _, dataset_units in itertools.groupby(units, lambda unit: inputs[unit.input].dataset):
        size = GROUP_BYTES + 1  # so that the first unit of a dataset begins a group
        for unit in dataset_units:
            if size + unit.size > GROUP_BYTES:
                groups.append([])
                size = 0
            groups[-1].append(unit)
            size += unit.size
    return tuple(map(tuple, groups))


def read_records(entry: Input, unit: Unit) -> Iterator[tuple[int, bytes | dict[str, Any] | RecordError]]:
    """Yield the pair (number, content) of each record of a unit. If a record can't be decoded, its content is a RecordError.

    The number is that of the line, element or row in the file, from 1. Blank lines are skipped but counted.

    Raises:
      CorpusFileError: The file can't be read, or has changed.
      RecordError: A line has more than 256 MiB.
    """
    return ((number, raw) for number, raw in _numbered(entry, unit) if raw is not None)


def _numbered(entry: Input, unit: Unit) -> Iterator[tuple[int, bytes | dict[str, Any] | RecordError | None]]:
    """Do what `read_records` does, but also yield None for each blank line, and for the empty text after the last newline."""
    if entry.kind in ROW_FILES:
        yield from enumerate(ROW_FILES[entry.kind].rows(entry, unit), unit.first)
        return
    if entry.kind == "jsonl" and not entry.compression:
        data = _lines_of(entry, unit)
    else:
        data = decompression.read_part(entry.path, entry.size, entry.compression, unit)
    if entry.kind == "text":
        yield unit.first, {"text": decoded(data, "utf-8-sig")}
        return
    if entry.kind == "array":
        yield from enumerate(text_files.elements(data), unit.first)
        return
    if unit.start == 0:
        data = data.removeprefix(text_files.BOM)
    for number, line in enumerate(data.split(b"\n"), unit.first):
        line = line.rstrip(b"\r")
        if len(line) > text_files.MAX_RECORD:
            raise text_files.too_long(f"{entry.path}:{number}", "line")
        yield number, line if line.strip() else None


def all_records(datasets: Sequence[Sequence[str]]) -> Iterator[tuple[str, int, bytes | dict[str, Any] | RecordError]]:
    """Yield (path, number, content) for every record of all files, as `read_records` does."""
    for dataset, path, size in _sized_paths(datasets):
        entry, parts = _describe(dataset, path, size, lambda position: None)
        first = 1
        for part in parts:
            # For plain lines, the last item is the empty text after the last newline. Its number is that of the next part's
            # first line.
            number = first
            for number, raw in _numbered(entry, Unit(part.start, part.stop, part.records, part.digest, first=first)):
                if raw is not None:
                    yield path, number, raw
            first = first + part.records if part.records else number


def _read_unit(entry: Input, unit: Unit) -> tuple[bytes, memoryview]:
    """Return the bytes of a unit twice: with the byte before the unit, and without it.

    If the byte before the unit is a newline, a line begins at the unit's first byte.
    """
    begin = max(0, unit.start - 1)
    data = read_exactly(entry.path, entry.size, begin, unit.stop)
    return data, memoryview(data)[unit.start - begin :]


def _lines_of(entry: Input, unit: Unit) -> bytes:
    """Return the bytes of the lines that begin in a unit, up to the end of the last line."""
    data, own_data = _read_unit(entry, unit)
    check_digest(entry.path, own_data, unit.digest)
    # a line begins after each newline; if the last byte of `data` is a newline, the line after it belongs to the next unit
    start = data.find(b"\n", 0, len(data) - 1) + 1 if unit.start else 0
    if unit.start and not start:
        return b""  # no line begins in the unit
    tail, stop = bytearray(), unit.stop  # bytes after the unit, for the end of its last line, and where they end
    # `read_records` refuses a line of more than `MAX_RECORD` bytes
    while not (data.endswith(b"\n") or b"\n" in tail) and stop < entry.size and len(tail) <= text_files.MAX_RECORD:
        # each read is as long as the tail so far, so a long line needs few reads
        tail += read_exactly(entry.path, entry.size, stop, stop + max(_TAIL, len(tail)))
        stop = unit.stop + len(tail)
    tail_end = tail.find(b"\n") + 1 or len(tail)
    return b"".join([memoryview(data)[start:], memoryview(tail)[:tail_end]])


def _size(path: str) -> int:
    """Return the number of bytes of a regular file. Refuse folders and pipes."""
    check_name("input", path)
    size = files.size(path)
    if not files.is_remote(path) and os.path.isdir(path):
        raise CorpusFileError(f"{path}: is a folder. Name the folder itself instead of a glob, or name its files.")
    if not files.is_remote(path) and not os.path.isfile(path):
        problem = f"{path}: is not a regular file. Expected a file that can be read more than once"
        raise CorpusFileError(f"{problem}. Write its content to a file.")
    return size


def _describe(dataset: int, path: str, size: int, report: ReadReport) -> tuple[Input, Iterable[Part]]:
    """Return the `Input` of a file, its `parts` still empty, and its parts. JSON and text are read while these are iterated."""
    head = files.read_range(path, 0, min(size, 32))
    file_stamp.refuse_lfs_pointer(path, head)
    for kind, module in ROW_FILES.items():
        if module.matches(path, head):
            row_parts, note = module.describe(path, size, MAX_BLOCKS * BLOCK, report)
            return Input(dataset, path, size, kind, note=note), row_parts
    if not size and path.endswith((".gz", ".zst")):
        raise CorpusFileError(f"{path}: is empty, so it is not a compressed file. Copy it again.")
    compression = decompression.compression_of(path, head)
    kind, parts = text_files.kind_and_parts(path, size, compression, MAX_BLOCKS * BLOCK, report)
    return Input(dataset, path, size, kind, compression), parts if compression or kind != "jsonl" else _cuts(size)


def _cuts(size: int) -> Iterator[Part]:
    """Yield the parts of a file of plain lines."""
    num_blocks = max(1, min(MAX_BLOCKS, -(-size // (BLOCK * MANY_BLOCKS))))
    for start in range(0, size, num_blocks * BLOCK):
        yield Part(start, min(start + num_blocks * BLOCK, size))
