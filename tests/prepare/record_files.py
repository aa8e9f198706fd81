"""Write records in files of every kind, and return what the package reads from a file."""

import gzip
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet as pyarrow_parquet

from grain_sft.prepare.records import inputs

Record = dict[str, Any]


def lines(records: Iterable[Record]) -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()


def array(records: list[Record]) -> bytes:
    return json.dumps(records, indent=1).encode()


def parquet(records: list[Record]) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow_parquet.write_table(pyarrow.Table.from_pylist(records), sink, row_group_size=7)
    return bytes(sink.getvalue())


def arrow_stream(records: list[Record], batch: int = 7, new: str = "new_stream", **options: Any) -> bytes:
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(records)
    with getattr(pyarrow.ipc, new)(sink, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch)
    return bytes(sink.getvalue())


def write_array_record(path: Path, records: Iterable[bytes], options: str = "group_size:3") -> Path:
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def array_record(records: list[Record]) -> bytes:
    with tempfile.NamedTemporaryFile() as file:
        return write_array_record(Path(file.name), lines(records).splitlines()).read_bytes()


zstd = zstandard.ZstdCompressor(write_checksum=True).compress
KINDS: dict[str, Callable[[list[Record]], bytes]] = {
    "jsonl": lines,
    "json": array,
    "parquet": parquet,
    "arrow": arrow_stream,
    "array_record": array_record,
    "jsonl.gz": lambda records: gzip.compress(lines(records)),
    "json.gz": lambda records: gzip.compress(array(records)),
    "jsonl.zst": lambda records: zstd(lines(records)),
    "json.zst": lambda records: zstd(array(records)),
}
"""Functions that return the bytes of a file, by the end of its name."""
COLUMNS = ("parquet", "arrow")
"""Kinds of files whose records all have the same keys."""


def units_of(path: Path | str) -> tuple[inputs.Input, tuple[inputs.Unit, ...]]:
    """Return the input of a file, and its scanned units."""
    [entry] = inputs.list_inputs([[str(path)]])
    return entry, inputs.assemble([entry], [inputs.scan_unit(entry, unit) for unit in inputs.plan_units([entry])])[1]


def read_all(path: Path | str, draw: random.Random | None = None) -> list[tuple[int, Any]]:
    """Return the number and the value of every record of a file. With `draw`, read the file's units in a random order."""
    entry, units = units_of(path)
    shuffled = draw.sample(units, len(units)) if draw else units
    found = [record for unit in shuffled for record in inputs.read_records(entry, unit)]
    return sorted(found, key=lambda record: record[0])
