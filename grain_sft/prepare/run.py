"""prepare: a corpus made of conversations, on this machine."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Sequence
from typing import Any

from grain_sft.arguments import as_integer
from grain_sft.errors import GrainSftError, PrepareError, RecordError
from grain_sft.prepare import inputs
from grain_sft.prepare.inputs import Input, Scan, Unit
from grain_sft.prepare.job import Job
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target
from grain_sft.prepare.workers import render_all

Progress = Callable[[str, int, int], None]
"""Function of an activity, the amount done, and the whole amount."""

SCAN_THREADS = 8
UNITS_PER_WORKER = 4  # fewer are rendered before a worker has started


def prepare(
    request: Request,
    output: str | os.PathLike[str],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the corpus that `request` describes, or continue to make it, in the folder `output`.

    The same request gives the same bytes, whatever the number of workers, and however often it was interrupted. The
    folder appears when it is complete; unfinished work is kept next to it. A finished corpus is left unchanged.

    Args:
      request: Inputs, template, tokenizer and format.
      output: Folder that does not exist yet or is empty; local, or a URL such as `gs://bucket/name`.
      workers: Number of processes. None: one per core, and fewer for little work.
      overwrite: Whether to begin again where the output or unfinished work is of another request.
      progress: Function that is called as the work proceeds.

    Returns:
      The corpus's manifest, `prepare.json`: the request, inputs, tokenizer, and the statistics of each split; with
      "already": True where it was finished before.

    Raises:
      RecordError: A record is bad, and `request.on_error` is "stop"; with its file and line.
      PrepareError: Options don't fit, or the output is of other inputs or options; with the differences.
      CorpusFileError: An input can't be read.
      StorageError: The output can't be written.
    """
    report = progress or (lambda what, done, total: None)
    if workers is not None:
        as_integer("workers", workers, 1, PrepareError)
    target = Target(output)
    target.check_writable()
    entries = inputs.list_inputs([dataset.paths for dataset in request.datasets], report)
    units = inputs.plan_units(entries)
    job = Job.of(request, target, entries, units, _scan(entries, units, report))
    found = target.finished(job.identity(), overwrite=overwrite)
    if found is not None:
        target.discard()
        return {**found, "already": True}
    with target.claim(job.identity(), overwrite=overwrite):
        todo = [unit for unit in job.units if job.chunks.header(unit.number) is None]
        total = sum(_cost(entries, unit) for unit in units)
        done = total - sum(_cost(entries, unit) for unit in todo)
        report("Rendering", done, total)
        most = min(os.cpu_count() or 1, -(-len(todo) // UNITS_PER_WORKER)) if workers is None else workers
        try:
            for unit in render_all(job, todo, most):
                done += _cost(entries, unit)
                report("Rendering", done, total)
        except GrainSftError as error:
            if isinstance(error, RecordError) or not done:
                target.discard()  # the same request would fail again, and a corrected one finds nothing in its way
            raise
        try:
            plan = job.plan()
        except PrepareError:
            target.discard()
            raise
        tasks = [task for split in plan.splits for task in job.format.tasks(plan, split)]
        for number, task in enumerate(tasks):
            report("Writing", number, len(tasks))
            job.format.write(plan, task)
        report("Writing", len(tasks), len(tasks))
        manifest = job.finish(plan)
        target.publish()
        return manifest


def _scan(entries: Sequence[Input], units: Sequence[Unit], report: Progress) -> list[Scan]:
    total = sum(_cost(entries, unit) for unit in units)
    found, done = [], 0
    with concurrent.futures.ThreadPoolExecutor(SCAN_THREADS) as pool:
        for unit, scan in zip(
            units, pool.map(lambda unit: inputs.scan_unit(entries[unit.input], unit), units), strict=True
        ):
            found.append(scan)
            done += _cost(entries, unit)
            report("Scanning the inputs", done, total)
    return found


def _cost(entries: Sequence[Input], unit: Unit) -> int:
    """Return the bytes of a unit; of a file that is not cut by bytes, its share."""
    entry = entries[unit.input]
    if entry.parts is None:
        return unit.stop - unit.start
    return entry.size * sum(entry.parts[unit.start : unit.stop]) // max(1, sum(entry.parts))
