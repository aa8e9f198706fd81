"""prepare: conversations in, a corpus out, on this machine."""

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
from grain_sft.prepare.pool import render_all
from grain_sft.prepare.request import Request
from grain_sft.prepare.target import Target

Progress = Callable[[str, int, int], None]
"""Told (what is being done, done, of how much)."""

SCAN_THREADS = 8
UNITS_PER_WORKER = 4  # fewer are done before a worker has started


def prepare(
    request: Request,
    output: str | os.PathLike[str],
    *,
    workers: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Make the corpus that `request` describes, or go on making it, in the folder `output`.

    The same request gives the same bytes, whatever the number of workers, and however often it was interrupted. The
    folder appears when it is complete; unfinished work is kept beside it. Where the corpus is there already, nothing
    is done.

    Args:
      request: what to make of which conversations.
      output: a folder that does not exist yet or is empty; local, or a URL such as `gs://bucket/name`.
      workers: processes. None: one a core, and fewer where there is little to do.
      overwrite: begin anew, where the output or unfinished work is of another request.
      progress: called as the work proceeds.

    Returns:
      The corpus's manifest, `prepare.json`: the request, inputs, tokenizer, and the statistics of each split; with
      "already": True where it was there.

    Raises:
      RecordError: a bad record, with its file and line, unless `request.on_error` is "skip".
      PrepareError: options that don't fit, or an output of other inputs or options: what changed is named.
      CorpusFileError: an input that can't be read.
      StorageError: the output can't be written.
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
                target.discard()  # the same request would fail again; whoever mends it finds nothing in the way
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
        return job.finish(plan)


def _scan(entries: Sequence[Input], units: Sequence[Unit], report: Progress) -> list[Scan]:
    total = sum(_cost(entries, unit) for unit in units)
    found, done = [], 0
    with concurrent.futures.ThreadPoolExecutor(SCAN_THREADS) as pool:
        for unit, scan in zip(
            units, pool.map(lambda unit: inputs.scan_unit(entries[unit.input], unit), units), strict=True
        ):
            found.append(scan)
            done += _cost(entries, unit)
            report("Looking through the inputs", done, total)
    return found


def _cost(entries: Sequence[Input], unit: Unit) -> int:
    """Bytes of a unit; its share of a file that is not cut by bytes."""
    entry = entries[unit.input]
    if entry.parts is None:
        return unit.stop - unit.start
    return entry.size * sum(entry.parts[unit.start : unit.stop]) // max(1, sum(entry.parts))
