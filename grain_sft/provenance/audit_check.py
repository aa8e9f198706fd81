"""Check of an audit log: whether a run of a given pipeline can have written it."""

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError
from grain_sft.pipeline import Pipeline
from grain_sft.provenance.audit import CUT, read_line
from grain_sft.provenance.events import COMPLETE, LOAD
from grain_sft.provenance.line_checker import Checked, Finding, LineChecker, natural_number, receipt_parts
from grain_sft.sampling import Host
from grain_sft.storage import files


def check_audit(path: str | os.PathLike[str], pipeline: Pipeline) -> Checked:
    """Compare an audit log, text or JSONL, with the pipeline of its run.

    The check computes again each field that follows from the pipeline. Entries from the time before an amendment or a stage
    was added are compared with the run as it was then.

    Args:
      path: Path or URL of the log.
      pipeline: Pipeline of any host. If the order of rows depends on the number of hosts, the number in the log is used.

    Raises:
      CorpusFileError: The log does not exist, or can't be read.
      CorpusError: The log is empty.
    """
    fix = "A run writes its log with its first batch. Give the log of a run that has begun."
    where = files.normalize(path)
    if not files.exists(where):
        raise CorpusFileError(f"{where}: no such file. {fix} Its name ends in .log or .jsonl.")
    data = files.read_bytes(where)
    if not data:
        raise CorpusError(f"{where}: is empty. {fix}")
    lines = _parsed_lines(data)
    loads = [index for index, fields in enumerate(lines) if fields.get("action") == LOAD]
    if loads:
        pipeline = _with_hosts(pipeline, natural_number(lines[loads[0]].get("hosts")))
    checker = LineChecker(pipeline)
    # A process begins with LOAD. All its lines come from one version of the run: one set of amendments and stages.
    for begin, end in itertools.pairwise(sorted({0, *loads, len(lines)})):
        process = lines[begin:end]
        completed = (natural_number(fields.get("step")) for fields in process if fields.get("action") == COMPLETE)
        versions = _versions(pipeline, process[0], max(completed, default=-1))
        checker = _checked_as_best_version(checker, versions, process)
    checker.check_end(pipeline)
    checked = checker.checked
    if not checked.entries and not checked.findings:
        checked.findings.append(Finding(1, "the file has no entry of an audit log."))
    return checked


def _parsed_lines(data: bytes) -> list[dict[str, str]]:
    """Return the fields of each entry, {} for an unfinished line, and {"unreadable": reason} for any other line."""
    *lines, last = data.split(b"\n")
    if last:  # the last line has no newline, so it is unfinished
        lines.append(last + CUT)
    parsed = [_parsed(line) for line in lines]
    # Version 0.1.0 did not mark unfinished lines with `CUT`, but ended each entry with the field `chain`. So an entry without
    # `chain` is unfinished if the next entry has that field.
    for number, (fields, following) in enumerate(itertools.pairwise(parsed)):
        if "chain" in following and "chain" not in fields:
            parsed[number] = {}
    return parsed


def _parsed(line: bytes) -> dict[str, str]:
    """Return a line as `_parsed_lines` does, except that `CUT` alone marks an unfinished line."""
    if line.endswith(CUT):
        return {}
    try:
        return read_line(line)
    except (ValueError, RecursionError) as error:
        return {"unreadable": str(error)}


def _with_hosts(pipeline: Pipeline, hosts: int) -> Pipeline:
    """Return the pipeline for `hosts` hosts if this number affects the order of rows and divides all batches; else `pipeline`.

    A number that does not divide all batches may be right too: a run may change the number of hosts with its batch size.
    """
    sampler = pipeline.sampler
    divides_batches = hosts > 0 and all(rows % hosts == 0 for rows in sampler.batch_sizes.sizes)
    return pipeline.replace(host=Host(0, hosts)) if sampler.host_blocks and divides_batches else pipeline


def _versions(pipeline: Pipeline, load: Mapping[str, str], last_step: int) -> Iterator[Pipeline]:
    """Yield the versions of a run that may have written the log's entry `load`.

    The receipt in the entry lists the amendments and stages that the run had then. The receipt does not state where the last
    of these stages ended. So there is a version for each possible end. A version is made when it is needed, because a mixture
    may take seconds.

    Args:
      pipeline: Pipeline of the run as it is now.
      load: Fields of the entry, whose action is `dataset_load`.
      last_step: Highest step of the `epoch_complete` entries between `load` and the next load; -1 without such an entry.
    """
    parts = receipt_parts(load.get("receipt_parts"))
    if not parts:
        yield pipeline
        return
    num_amendments = sum(f"amendment {number}" in parts for number in range(1, len(pipeline.amendments) + 1))
    # the first stage has no part of its own in a receipt
    num_stages = 1 + sum(f"stage {number}" in parts for number in range(2, len(pipeline.later_stages) + 2))
    amended = pipeline  # the run with all its stages, but only with the amendments that it had at `load`
    if num_amendments < len(pipeline.amendments):
        amended = pipeline.replace(num_amendments=num_amendments)
    has_all_stages = num_stages == 1 + len(pipeline.later_stages)
    if has_all_stages:
        yield amended  # with the stages as they are now
    try:
        yield from amended.with_first_stages(num_stages, last_step)
    except GrainSftError:  # the entry was changed, so no version fits
        if not has_all_stages:
            yield amended


def _checked_as_best_version(
    checker: LineChecker, versions: Iterable[Pipeline], lines: Sequence[Mapping[str, str]]
) -> LineChecker:
    """Check `lines` against each version of the run. Return the checker of the version with the fewest findings."""
    checkers = []
    for version in versions:
        version_checker = checker.as_written_by(version)
        for fields in lines:
            version_checker.check(fields)
        if len(version_checker.checked.findings) == len(checker.checked.findings):  # `lines` have added no findings
            return version_checker
        checkers.append(version_checker)
    return min(checkers, key=lambda each: len(each.checked.findings))
