"""Beam steps: what Beam's workers do, as functions at module level; they need an installed grain_sft, and nothing more.

Any of them may run twice, also at once, and on any machine: each writes files that appear whole and are the same each
time, and none removes or renames one. What must not happen twice is done where the pipeline was started.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from grain_sft.errors import GrainSftError
from grain_sft.prepare import inputs
from grain_sft.prepare.inputs import Input, Scan, Unit
from grain_sft.prepare.job import Job
from grain_sft.prepare.request import Request
from grain_sft.prepare.saved import load_job, load_listing, load_plan, save_job, save_plan
from grain_sft.prepare.target import Target
from grain_sft.prepare.work import Renderer
from grain_sft.prepare.writers import Plan, Task
from grain_sft.storage import files

PAUSES = (1.0, 4.0)  # seconds before storage that failed is tried again

T = TypeVar("T")

_one = threading.RLock()
"""One thread of a process works, however many the runner starts: the others would take memory, and not be faster."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of the pipeline: all that its steps are told.

    Attributes:
      name: of the run's folder of notes, in that of the unfinished work.
    """

    request: Request
    output: str
    overwrite: bool
    name: str

    @property
    def target(self) -> Target:
        """Where the corpus goes."""
        return Target(self.output)

    @property
    def folder(self) -> str:
        """The run's notes: what files there are, the job, its plan, and how it ended."""
        return files.join(self.target.work, self.name)

    def conclude(self, outcome: dict[str, Any]) -> None:
        """Note how the run ended; the steps that follow then do nothing."""
        files.write_bytes(files.join(self.folder, "outcome.json"), json.dumps(outcome).encode())

    def outcome(self) -> dict[str, Any] | None:
        """How it ended, if it did: {"manifest"}, {"error", "message"}, or {"replace"} where something of another
        preparation has to be cleared first."""
        path = files.join(self.folder, "outcome.json")
        if not files.exists(path):
            return None
        found: dict[str, Any] = json.loads(files.read_bytes(path))
        return found


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error of ours as data: a runner would try it again, and show a traceback of its own.

    Attributes:
      order: of the unit or task.
      error: name in `grain_sft.errors`.
    """

    order: int
    error: str
    message: str


def numbers(units: int) -> Iterator[int]:
    """The number of each unit."""
    yield from range(units)


def scan(unit: int, run: Run) -> tuple[int, Scan | Failure]:
    """Look through a unit."""
    entries, units = _listing(run)
    found = units[unit]
    return unit, _attempt(unit, lambda: inputs.scan_unit(entries[found.input], found))


def begin(_: object, run: Run, scans: Iterable[tuple[int, Scan | Failure]]) -> Iterator[int]:
    """Take up the work; gives the units to render."""
    found = dict(scans)
    failures = [scanned for scanned in found.values() if isinstance(scanned, Failure)]
    if not _conclude(run, failures):
        yield from _unless_failed(run, lambda: _begin(run, found)) or ()


def render(unit: int, run: Run) -> Iterator[Failure]:
    """Make a unit's chunk; gives its failure, if it has one."""
    with _one:
        if _failed_before(run, unit):
            return
        result = _attempt(unit, lambda: _job(run).render(_job(run).units[unit], _renderer(run)))
        if isinstance(result, Failure):
            files.write_bytes(files.join(run.folder, "failed"), str(unit).encode())
            yield result


def plan(_: object, run: Run, failures: Iterable[Failure]) -> Iterator[Task]:
    """Plan the corpus; gives the tasks of writing it."""
    if run.outcome() is None and not _conclude(run, failures):
        yield from _unless_failed(run, lambda: _make_plan(run)) or ()


def write(task: Task, run: Run) -> Iterator[Failure]:
    """Write a piece of the corpus; gives its failure, if it has one."""
    with _one:
        result = _attempt(task.number, lambda: _job(run).format.write(_plan(run), task))
    if isinstance(result, Failure):
        yield result


def finish(_: object, run: Run, failures: Iterable[Failure]) -> None:
    """Write what is left."""
    if run.outcome() is None and not _conclude(run, failures):
        manifest = _unless_failed(run, lambda: _job(run).complete(_plan(run)))
        if manifest is not None:
            run.conclude({"manifest": manifest})


def _begin(run: Run, scans: dict[int, Any]) -> range:
    entries, units = _listing(run)
    target = run.target
    job = Job.of(run.request, target, entries, units, [scans[unit.number] for unit in units])
    found = target.finished(job.identity(), overwrite=run.overwrite)
    if found is not None:
        run.conclude({"manifest": {**found, "already": True}})
        return range(0)
    if target.holds_other(job.identity(), overwrite=run.overwrite):
        run.conclude({"replace": True})
        return range(0)
    target.mark(job.identity())
    save_job(run.folder, job)
    return range(len(units))


def _make_plan(run: Run) -> list[Task]:
    job = _job(run)
    made = job.plan()
    save_plan(run.folder, made)
    return [task for split in made.splits for task in job.format.tasks(made, split)]


def _failed_before(run: Run, unit: int) -> bool:
    """Whether an earlier unit has failed, so that this one decides nothing any more."""
    path = files.join(run.folder, "failed")
    return files.exists(path) and int(files.read_bytes(path)) < unit


def _conclude(run: Run, failures: Iterable[Failure]) -> bool:
    """End the run with the first of the failures, if there are any."""
    first = min(failures, key=lambda failure: (failure.order, failure.message), default=None)
    if first is not None:
        run.conclude({"error": first.error, "message": first.message})
    return first is not None


def _unless_failed(run: Run, step: Callable[[], T]) -> T | None:
    """What a step gives; None where it failed, which ends the run."""
    with _one:
        result = _attempt(0, step)
    if isinstance(result, Failure):
        _conclude(run, [result])
        return None
    return result


def _attempt(order: int, step: Callable[[], T]) -> T | Failure:
    """What a step gives, or its failure. What storage may do better the next time is tried again."""
    for pause in (*PAUSES, None):
        try:
            return step()
        except GrainSftError as error:
            if pause is None or not isinstance(error, OSError):
                return Failure(order, type(error).__name__, str(error))
            time.sleep(pause)
    raise AssertionError


# Notes are the same as long as a run lasts, so each process reads them once.


@functools.lru_cache(1)
def _listing(run: Run) -> tuple[tuple[Input, ...], tuple[Unit, ...]]:
    return load_listing(run.folder)


@functools.lru_cache(1)
def _job(run: Run) -> Job:
    return load_job(run.folder, run.target)


@functools.lru_cache(1)
def _renderer(run: Run) -> Renderer:
    return Renderer(_job(run).work)


@functools.lru_cache(1)
def _plan(run: Run) -> Plan:
    return load_plan(run.folder, _job(run))
