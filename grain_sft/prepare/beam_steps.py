"""Beam steps: the functions of Beam's workers, at module level; they need an installed grain_sft, and nothing more.

Any of them may run twice, also at once, and on any machine: each writes files that appear whole and are the same each
time, and none removes or renames one. Steps that must not run twice are left to the process that starts the pipeline.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from grain_sft.errors import GrainSftError
from grain_sft.prepare.chunks import Header
from grain_sft.prepare.documents import Table
from grain_sft.prepare.job import Job
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.inputs import Input, Scan, Unit
from grain_sft.prepare.render import Renderer, Work
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target
from grain_sft.prepare.writers import Plan, SplitStatistics, Task
from grain_sft.storage import files

PAUSES = (1.0, 4.0)  # seconds before a failed access to storage is tried again

T = TypeVar("T")

_lock = threading.RLock()
"""One thread of a process works, however many the runner starts: more would take memory, and not be faster."""


class Outcome(msgspec.Struct):
    """End of a run: its manifest, an error of `grain_sft.errors`, or `replace`: another preparation has to be cleared."""

    manifest: dict[str, Any] = {}
    error: str = ""
    message: str = ""
    replace: bool = False


class _Inputs(msgspec.Struct):
    inputs: tuple[Input, ...]
    units: tuple[Unit, ...]


class _Job(msgspec.Struct):
    work: Work
    units: tuple[Unit, ...]
    firsts: tuple[int, ...]
    input_digests: tuple[str, ...]
    input_records: tuple[int, ...]


class _Plan(msgspec.Struct):
    statistics: dict[str, SplitStatistics]
    binary: bool
    headers: tuple[Header, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the pipeline, the argument of all steps.

    Attributes:
      request: Inputs, template, tokenizer and format.
      output: Folder of the corpus.
      overwrite: Whether files of another preparation may be cleared.
      name: Name of the run's folder of notes, in the folder of unfinished work.
    """

    request: Request
    output: str
    overwrite: bool
    name: str

    @property
    def target(self) -> Target:
        """Target of the corpus."""
        return Target(self.output)

    @property
    def folder(self) -> str:
        """Folder of the run's notes: its inputs, job, plan and outcome."""
        return files.join(self.target.work, self.name)

    def save(self, name: str, data: bytes) -> None:
        """Write a note."""
        files.write_bytes(files.join(self.folder, name), data)

    def load(self, name: str) -> bytes:
        """Read a note."""
        return files.read_bytes(files.join(self.folder, name))

    def save_inputs(self, entries: Sequence[Input], units: Sequence[Unit]) -> None:
        """Write the inputs and their units."""
        self.save("inputs.json", msgspec.json.encode(_Inputs(tuple(entries), tuple(units))))

    def conclude(self, outcome: Outcome) -> None:
        """Write the outcome; the following steps then do nothing."""
        self.save("outcome.json", msgspec.json.encode(outcome))

    def outcome(self) -> Outcome | None:
        """Return the outcome, if the run has ended."""
        if not files.exists(files.join(self.folder, "outcome.json")):
            return None
        return msgspec.json.decode(self.load("outcome.json"), type=Outcome)


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error as data: a runner would retry an exception, and show a traceback of its own.

    Attributes:
      order: Number of the unit or task.
      error: Name in `grain_sft.errors`.
      message: Text of the error.
    """

    order: int
    error: str
    message: str


def numbers(units: int) -> Iterator[int]:
    """Yield the number of each unit."""
    yield from range(units)


def scan(unit: int, run: Run) -> tuple[int, Scan | Failure]:
    """Count and hash a unit."""
    listing = _inputs(run)
    found = listing.units[unit]
    return unit, _attempt(unit, lambda: inputs.scan_unit(listing.inputs[found.input], found))


def begin(_: object, run: Run, scans: Iterable[tuple[int, Scan | Failure]]) -> Iterator[int]:
    """Begin or continue the work; yield the units to render."""
    found = dict(scans)
    if not _conclude(run, [scanned for scanned in found.values() if isinstance(scanned, Failure)]):
        yield from _unless_failed(run, lambda: _begin(run, found)) or ()


def render(unit: int, run: Run) -> Iterator[Failure]:
    """Make a unit's chunk; yield its failure, if it has one."""
    with _lock:
        if _failed_before(run, unit):
            return
        result = _attempt(unit, lambda: _job(run).render(_job(run).units[unit], _renderer(run)))
        if isinstance(result, Failure):
            run.save("failed", str(unit).encode())
            yield result


def plan(_: object, run: Run, failures: Iterable[Failure]) -> Iterator[Task]:
    """Plan the corpus; yield the tasks of writing it."""
    if run.outcome() is None and not _conclude(run, failures):
        yield from _unless_failed(run, lambda: _make_plan(run)) or ()


def write(task: Task, run: Run) -> Iterator[Failure]:
    """Write a part of the corpus; yield its failure, if it has one."""
    with _lock:
        result = _attempt(task.number, lambda: _job(run).format.write(_plan(run), task))
    if isinstance(result, Failure):
        yield result


def finish(_: object, run: Run, failures: Iterable[Failure]) -> None:
    """Write metadata and manifest."""
    if run.outcome() is None and not _conclude(run, failures):
        manifest = _unless_failed(run, lambda: _job(run).finish(_plan(run)))
        if manifest is not None:
            run.conclude(Outcome(manifest))


def _begin(run: Run, scans: dict[int, Any]) -> range:
    listing = _inputs(run)
    target, units = run.target, listing.units
    job = Job.of(run.request, target, listing.inputs, units, [scans[unit.number] for unit in units])
    found = target.finished(job.identity(), overwrite=run.overwrite)
    if found is not None:
        run.conclude(Outcome({**found, "already": True}))
        return range(0)
    if target.holds_other(job.identity(), overwrite=run.overwrite):
        run.conclude(Outcome(replace=True))
        return range(0)
    target.mark(job.identity())
    note = _Job(*(getattr(job, name) for name in _Job.__struct_fields__))
    run.save("job.json", msgspec.json.encode(note))
    return range(len(units))


def _make_plan(run: Run) -> list[Task]:
    """Plan the corpus and save the plan: 4 bytes a document, and 8 for each time that it is in a split."""
    job = _job(run)
    made = job.plan()
    table = Table.of(job.chunks, len(job.units))
    headers = tuple(dataclasses.replace(header, rejected=()) for header in table.headers)
    run.save("plan.json", msgspec.json.encode(_Plan(dict(made.statistics), made.binary, headers)))
    run.save("lengths.bin", table.lengths.astype("<u4").tobytes())
    for split, ids in made.splits.items():
        run.save(f"{split}.bin", ids.astype("<i8").tobytes())
    return [task for split in made.splits for task in job.format.tasks(made, split)]


def _failed_before(run: Run, unit: int) -> bool:
    """Return whether an earlier unit has failed, so that this one decides nothing any more."""
    return files.exists(files.join(run.folder, "failed")) and int(run.load("failed")) < unit


def _conclude(run: Run, failures: Iterable[Failure]) -> bool:
    """End the run with the first of the failures, if any."""
    first = min(failures, key=lambda failure: (failure.order, failure.message), default=None)
    if first is not None:
        run.conclude(Outcome(error=first.error, message=first.message))
    return first is not None


def _unless_failed(run: Run, step: Callable[[], T]) -> T | None:
    """Return the result of a step; None where it failed, which ends the run."""
    with _lock:
        result = _attempt(0, step)
    if isinstance(result, Failure):
        _conclude(run, [result])
        return None
    return result


def _attempt(order: int, step: Callable[[], T]) -> T | Failure:
    """Return the result of a step, or its failure. Failed accesses to storage are tried again."""
    for pause in (*PAUSES, None):
        try:
            return step()
        except GrainSftError as error:
            if pause is None or not isinstance(error, OSError):
                return Failure(order, type(error).__name__, str(error))
            time.sleep(pause)
    raise AssertionError


# Notes do not change during a run, so each process reads them once.


@functools.lru_cache(1)
def _inputs(run: Run) -> _Inputs:
    return msgspec.json.decode(run.load("inputs.json"), type=_Inputs)


@functools.lru_cache(1)
def _job(run: Run) -> Job:
    return Job(target=run.target, **msgspec.structs.asdict(msgspec.json.decode(run.load("job.json"), type=_Job)))


@functools.lru_cache(1)
def _renderer(run: Run) -> Renderer:
    return Renderer(_job(run).work)


@functools.lru_cache(1)
def _plan(run: Run) -> Plan:
    note = msgspec.json.decode(run.load("plan.json"), type=_Plan)

    def array(name: str, dtype: str) -> npt.NDArray[Any]:
        return np.frombuffer(run.load(f"{name}.bin"), dtype)

    table = Table.of_lengths(array("lengths", "<u4"), note.headers)
    splits = {split: array(split, "<i8") for split in note.statistics}
    return _job(run).plan_of(table, splits, note.statistics, note.binary)
