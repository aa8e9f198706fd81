"""Saved: a job and its plan as files in the folder of unfinished work, where workers on other machines find them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.prepare.chunk import Header
from grain_sft.prepare.inputs import Input, Unit
from grain_sft.prepare.job import Job
from grain_sft.prepare.store import Documents, Table
from grain_sft.prepare.target import Target
from grain_sft.prepare.worker import decode_work, encode_work
from grain_sft.prepare.writers import Plan, SplitStatistics
from grain_sft.storage import files

_LISTING, _JOB, _PLAN = "inputs.json", "job.json", "plan.json"
_NUMBERS = {field.name: field.type for field in dataclasses.fields(Header) if field.type in ("int", "bool")}


def save_listing(folder: str, entries: Sequence[Input], units: Sequence[Unit]) -> None:
    """Keep which files there are, and how they are cut."""
    _write(folder, _LISTING, {"inputs": [dataclasses.asdict(entry) for entry in entries], "units": _rows(units)})


def load_listing(folder: str) -> tuple[tuple[Input, ...], tuple[Unit, ...]]:
    """What `save_listing` kept."""
    fields = _read(folder, _LISTING)
    inputs = tuple(Input.of(values) for values in fields["inputs"])
    return inputs, _units(fields["units"])


def save_job(folder: str, job: Job) -> None:
    """Keep a job, but for its target."""
    fields = {
        "work": encode_work(job.work, job.target.chunks),
        "units": _rows(job.units),
        "firsts": job.firsts,
        "input_digests": job.input_digests,
        "input_records": job.input_records,
    }
    _write(folder, _JOB, fields)


def load_job(folder: str, target: Target) -> Job:
    """The job that `save_job` kept."""
    fields = _read(folder, _JOB)
    work, _ = decode_work(fields["work"])
    numbers = (tuple(fields[name]) for name in ("firsts", "input_digests", "input_records"))
    return Job(work, target, _units(fields["units"]), *numbers)


def save_plan(folder: str, plan: Plan) -> None:
    """Keep a plan of chunks: 4 bytes a document, and 8 for each time that it is in a split."""
    if not isinstance(plan.documents, Documents):
        raise TypeError("expected a plan of chunks")
    table = plan.documents.table
    headers = [[int(getattr(header, name)) for name in _NUMBERS] for header in table.headers]
    files.write_bytes(files.join(folder, "headers.bin"), np.array(headers, "<i8").tobytes())
    files.write_bytes(files.join(folder, "lengths.bin"), table.lengths.astype("<u4").tobytes())
    for split, ids in plan.splits.items():
        files.write_bytes(files.join(folder, f"{split}.bin"), ids.astype("<i8").tobytes())
    fields = {
        "tokenizer": plan.tokenizer,
        "statistics": {split: dataclasses.asdict(counts) for split, counts in plan.statistics.items()},
        "binary": plan.binary,
        "token_dtype": plan.documents.token_dtype.name,
        "loss_dtype": plan.documents.loss_dtype.name,
    }
    _write(folder, _PLAN, fields)


def load_plan(folder: str, job: Job) -> Plan:
    """The plan that `save_plan` kept. Its table has no rejected records: these are counted from the chunks."""
    fields = _read(folder, _PLAN)
    lengths = _array(folder, "lengths", "<u4")
    numbers = _array(folder, "headers", "<i8").reshape(-1, len(_NUMBERS))
    common = {
        "key": job.work.key,
        "token_dtype": fields["token_dtype"],
        "loss_dtype": fields["loss_dtype"],
        "rejected": (),
    }
    headers = [Header(**common, **_header(row)) for row in numbers.tolist()]
    table = Table.of_lengths(lengths, headers)
    return Plan(
        folder=job.target.stage,
        request=job.work.request,
        tokenizer=fields["tokenizer"],
        documents=Documents(job.chunks, table, [unit.input for unit in job.units]),
        splits={split: _array(folder, split, "<i8") for split in fields["statistics"]},
        statistics={split: SplitStatistics(**counts) for split, counts in fields["statistics"].items()},
        binary=fields["binary"],
        source_names=[entry.path for entry in job.work.inputs],
    )


def _header(row: Sequence[int]) -> dict[str, Any]:
    return {name: value != 0 if _NUMBERS[name] == "bool" else value for name, value in zip(_NUMBERS, row, strict=True)}


def _rows(units: Sequence[Unit]) -> list[tuple[Any, ...]]:
    return [dataclasses.astuple(unit) for unit in units]


def _units(rows: Sequence[Sequence[Any]]) -> tuple[Unit, ...]:
    return tuple(Unit(*row) for row in rows)


def _array(folder: str, name: str, dtype: str) -> npt.NDArray[Any]:
    return np.frombuffer(files.read_bytes(files.join(folder, f"{name}.bin")), dtype)


def _write(folder: str, name: str, fields: dict[str, Any]) -> None:
    files.write_bytes(files.join(folder, name), json.dumps(fields).encode())


def _read(folder: str, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(files.read_bytes(files.join(folder, name)))
    return fields
