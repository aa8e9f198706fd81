"""Beam steps: the functions of Beam's workers, at module level; they need an installed grain_sft, and nothing more.

Any of them may run twice, also at once, and on any machine: each writes files that appear whole and are the same each
time, and none removes or renames one. Steps that must not run twice are left to the process that starts the pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import GrainSftError
from grain_sft.prepare.chunks import Header
from grain_sft.prepare.job import Job
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.inputs import Input, Unit
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target
from grain_sft.prepare.workers import Failure
from grain_sft.prepare.writers import Plan, SplitStatistics, Task
from grain_sft.storage import files

PAUSES = (1.0, 4.0)  # seconds before a failed access to storage is tried again

T = TypeVar("T")

_lock = threading.RLock()
"""One thread of a process works, however many the runner starts: more would take memory, and not be faster."""


class Outcome(msgspec.Struct):
    """End of a run: its manifest, its first failure, or `replace`: another preparation has to be cleared."""

    manifest: dict[str, Any] = {}
    failure: Failure | None = None
    replace: bool = False


class _PlanNote(msgspec.Struct):
    statistics: dict[str, SplitStatistics]
    headers: tuple[Header, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the pipeline, the argument of all steps.

    Attributes:
      request: Inputs, template, tokenizer and format.
      output: Folder of the corpus.
      overwrite: Whether files of another preparation may be cleared.
      name: Name of the run's folder of notes, in the folder of unfinished work: inputs, job, plan and outcome.
    """

    request: Request
    output: str
    overwrite: bool
    name: str

    def path(self, name: str) -> str:
        """Return the path of a note."""
        return files.join(Target(self.output).work, self.name, name)

    def save(self, name: str, note: Any) -> None:
        """Write a note as JSON."""
        files.write_bytes(self.path(name), msgspec.json.encode(note))

    def load(self, name: str, kind: type[T]) -> T:
        """Read a note of JSON."""
        return msgspec.json.decode(files.read_bytes(self.path(name)), type=kind)

    def outcome(self) -> Outcome | None:
        """Return the outcome, if the run has ended; the following steps then do nothing."""
        return self.load("outcome.json", Outcome) if files.exists(self.path("outcome.json")) else None


def scan(unit: int, run: Run) -> tuple[int, Unit | None, Failure | None]:
    """Count and hash a unit."""
    entries, units = _inputs(run)
    return unit, *_attempt(unit, lambda: inputs.scan_unit(entries[units[unit].input], units[unit]))


def begin(_: object, run: Run, scans: Iterable[tuple[int, Unit | None, Failure | None]]) -> Iterator[int]:
    """Begin or continue the work; yield the units to render."""
    found = sorted(scans, key=lambda scanned: scanned[0])
    failures = [failure for *_, failure in found if failure is not None]
    yield from _advance(run, failures, lambda: _begin(run, [scan for _, scan, _ in found if scan is not None])) or ()


def _begin(run: Run, units: list[Unit]) -> range:
    entries, _ = _inputs(run)
    job = Job.of(run.request, run.output, entries, units)
    found = job.target.finished(job.identity, overwrite=run.overwrite)
    if found is not None:
        run.save("outcome.json", Outcome({**found, "already": True}))
    elif job.target.holds_other(job.identity, overwrite=run.overwrite):
        run.save("outcome.json", Outcome(replace=True))
    else:
        job.target.mark(job.identity)
        run.save("job.json", job)
        return range(len(units))
    return range(0)


def render(unit: int, run: Run) -> Iterator[Failure]:
    """Make a unit's chunk, unless it exists; yield its failure, if it has one."""

    def step() -> None:
        job = _job(run)
        if job.chunks.header(unit) is None:
            job.chunks.write(unit, job.render_unit(job.units[unit]))

    with _lock:
        if files.exists(run.path("failed")) and run.load("failed", int) < unit:
            return  # after an earlier unit has failed, this one decides nothing
        _, failure = _attempt(unit, step)
        if failure is not None:
            run.save("failed", unit)
            yield failure


def plan(_: object, run: Run, failures: Iterable[Failure]) -> Iterator[Task]:
    """Plan the corpus and save the plan; yield the tasks."""

    def step() -> list[Task]:
        job = _job(run)
        headers = job.headers()
        made = job.plan(headers)
        run.save("plan.json", _PlanNote(dict(made.statistics), headers))
        files.write_bytes(run.path("lengths.bin"), made.documents.lengths.astype("<u4").tobytes())
        for name, ids in made.splits.items():
            files.write_bytes(run.path(f"{name}.bin"), ids.astype("<i8").tobytes())
        return [task for split in made.splits for task in job.format.tasks(made, split)]

    yield from _advance(run, failures, step) or ()


def write(task: Task, run: Run) -> Iterator[Failure]:
    """Write a part of the corpus; yield its failure, if it has one."""
    with _lock:
        _, failure = _attempt(task.number, lambda: _job(run).format.write(_plan(run), task))
    if failure is not None:
        yield failure


def finish(_: object, run: Run, failures: Iterable[Failure]) -> None:
    """Write metadata and manifest."""
    manifest = _advance(run, failures, lambda: _job(run).finish(_plan(run)))
    if manifest is not None:
        run.save("outcome.json", Outcome(manifest))


def _advance(run: Run, failures: Iterable[Failure], step: Callable[[], T]) -> T | None:
    """Return the result of a step; None where the run has ended, or ends now, with the first failure."""
    if run.outcome() is not None:
        return None
    first, result = min(failures, key=lambda failure: (failure.unit, failure.message), default=None), None
    if first is None:
        with _lock:
            result, first = _attempt(0, step)
    if first is not None:
        run.save("outcome.json", Outcome(failure=first))
    return result


def _attempt(unit: int, step: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """Return the result of a step, or its failure: a runner would retry an exception, and show a traceback of its own.

    Failed accesses to storage are tried again.
    """
    for pause in (*PAUSES, None):
        try:
            return step(), None
        except GrainSftError as error:
            if pause is None or not isinstance(error, OSError):
                return None, Failure.of(unit, error)
            time.sleep(pause)
    raise AssertionError


# Notes do not change during a run, so each process reads them once.


@functools.lru_cache(1)
def _inputs(run: Run) -> tuple[tuple[Input, ...], list[Unit]]:
    entries = run.load("inputs.json", tuple[Input, ...])
    return entries, inputs.plan_units(entries)


@functools.lru_cache(1)
def _job(run: Run) -> Job:
    return run.load("job.json", Job)


@functools.lru_cache(1)
def _plan(run: Run) -> Plan:
    note, job = run.load("plan.json", _PlanNote), _job(run)

    def array(name: str, dtype: str) -> npt.NDArray[Any]:
        return np.frombuffer(files.read_bytes(run.path(f"{name}.bin")), dtype)

    documents = job.documents(note.headers, array("lengths", "<u4"))
    return job.plan_of(documents, {split: array(split, "<i8") for split in note.statistics}, note.statistics)
