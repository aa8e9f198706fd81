"""Check of an audit log: every field that follows from the pipeline is computed again and compared."""

import copy
import dataclasses
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from grain_sft.errors import CorpusError
from grain_sft.pipeline import Pipeline, begins_before
from grain_sft.provenance.audit import CUT, as_text, read_line
from grain_sft.provenance.earlier_runs import changes_of, receipt_parts, runs_of, shown
from grain_sft.provenance.events import COMPLETE, LOAD, RESUME, START, Event, Events
from grain_sft.sampling import Host
from grain_sft.storage import files

_NOT_COMPUTED = {"time", "entry", "chain", "grain_sft"}


class Finding(NamedTuple):
    """Message about line `line` of a log, counted from 1."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclasses.dataclass
class Checked:
    """Result of a check.

    Attributes:
      findings: Lines that contradict the pipeline.
      notes: Observations that contradict nothing.
      entries, loads, resumes: Number of all entries, of `dataset_load` entries and of `resume` entries.
      epochs: Epochs that were completed.
      receipt: Code of the pipeline's receipt.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[Finding] = dataclasses.field(default_factory=list)
    entries: int = 0
    loads: int = 0
    resumes: int = 0
    epochs: set[int] = dataclasses.field(default_factory=set)
    receipt: str = ""

    @property
    def accepted(self) -> bool:
        """Whether nothing in the log contradicts the pipeline's batches."""
        return not self.findings


def check_audit(path: str | os.PathLike[str], pipeline: Pipeline) -> Checked:
    """Compare an audit log, text or JSONL, with the pipeline of its run.

    Args:
      path: Path or URL of the log.
      pipeline: Pipeline of any host. If its order depends on the number of hosts, the log's number is used.

    Raises:
      CorpusFileError: The log can't be read.
      CorpusError: The log is empty.
    """
    data = files.read_bytes(files.normalize(path))
    if not data:
        raise CorpusError(
            f"{os.fspath(path)}: is empty. A run writes its log with its first batch. Give the log of a run that has begun."
        )
    *lines, last = data.split(b"\n")
    unfinished = [last + CUT] if last else []  # it has no newline
    parsed = [_parsed(line) for line in (*lines, *unfinished)]
    for number, (fields, following) in enumerate(itertools.pairwise(parsed)):
        if "chain" in following and "chain" not in fields:  # in an older log, only an unfinished line has none
            parsed[number] = {}
    loads = [number for number, fields in enumerate(parsed) if fields.get("action") == LOAD]
    hosts, sampler = _number(parsed[loads[0]].get("hosts")) if loads else -1, pipeline.sampler
    if sampler.host_blocks and hosts > 0 and not any(rows % hosts for rows in sampler.batch_sizes.sizes):
        pipeline = pipeline.replace(host=Host(0, hosts))
    run = _Run(pipeline)
    for begin, end in itertools.pairwise(sorted({0, *loads, len(parsed)})):
        completed = (_number(each.get("step")) for each in parsed[begin:end] if each.get("action") == COMPLETE)
        runs = runs_of(pipeline, parsed[begin], max(completed, default=-1))
        run = _checked(run, runs, parsed[begin:end])
    run.check_end(pipeline)
    checked = run.checked
    if not checked.entries and not checked.findings:
        checked.findings.append(Finding(1, "the file has no entry of an audit log."))
    return checked


def _parsed(line: bytes) -> dict[str, str]:
    """Return the fields of a line. An unfinished line has none; a line that is not an entry has `unreadable`, the reason."""
    try:
        return {} if line.endswith(CUT) else read_line(line)
    except (ValueError, RecursionError) as error:
        return {"unreadable": str(error)}


def _number(text: str | None) -> int:
    """Return the value of a decimal number, 0 or more; -1 for any other text."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else -1


class _Run:
    """State of a run after the lines of its log that were checked."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.checked = Checked(receipt=pipeline.receipt.code)
        self._pipeline = pipeline
        self._events = Events(pipeline)
        self._upcoming: Iterator[Event] = iter(())
        self._next: Event | None = None
        self._changes, self._num_stages = changes_of(pipeline), len(pipeline.stages)
        self._added: list[tuple[str, str]] = []  # changes that the last load has and the load before it lacks
        self._since: int | None = 0  # step at which batches began; None if a changed line may have stated another
        self._loaded = self._running = False
        self._lost = False  # whether the step is unknown because a line was changed; the next event states it
        self._reach = -1  # steps below it may have been delivered; -1 before the first load
        self._delivered = -1  # last step that was certainly delivered since the batches last began
        self._number = 0
        self._shifts = {0}  # accepted differences between the number of an entry and that of its line

    def as_written_by(self, pipeline: Pipeline) -> Self:
        """Return a copy of this state that continues with entries of `pipeline`."""
        following, before = copy.copy(self), self.checked
        if pipeline is not self._pipeline:
            following._pipeline, following._events, following._upcoming = pipeline, Events(pipeline), iter(())
        following.checked = dataclasses.replace(
            before, findings=[*before.findings], notes=[*before.notes], epochs={*before.epochs}
        )
        return following

    def check(self, fields: Mapping[str, str]) -> None:
        """Check the next line against the entries that a run may write there."""
        self._number += 1
        if not fields:
            self._note("was being written when its process ended.")
            return
        if "unreadable" in fields:
            self._lose_step(f"can't be read: {fields['unreadable']}. It was changed or added.")
            return
        shift, action = _number(fields.get("entry")) - self._number, fields["action"]
        if shift in self._shifts:
            self._shifts = {shift}
        elif "chain" not in fields:  # an older log counts whole lines only
            expected = f"expected {self._number + min(self._shifts)}"
            reason = "A line before it is missing, or it was changed, added or moved."
            self._report(f"entry={fields.get('entry')}; {expected}. {reason}")
            self._shifts = self._shifts | {shift}
        self.checked.entries += 1
        kinds = {LOAD: self._load, RESUME: self._resume, START: self._event, COMPLETE: self._event}
        if action not in kinds:
            self._lose_step(f"action={action}; expected one of {', '.join(kinds)}.")
            return
        if action != LOAD and not self._loaded:
            self._report(f"action={action} before any {LOAD}; expected {LOAD} first.")
            self._loaded = True
        kinds[action](fields)

    def check_end(self, pipeline: Pipeline) -> None:
        """Check that the steps that were delivered last have all amendments and stages of `pipeline`."""
        for kind, text in changes_of(pipeline):
            if (kind, text) not in self._changes and begins_before(self._delivered + 1, [text]):
                change = shown(kind, text)
                self._report(f"steps up to {self._delivered} were handed out without {kind} of the config: {change}.")

    def _load(self, fields: Mapping[str, str]) -> None:
        self.checked.loads += 1
        stages, changes = self._pipeline.stages, changes_of(self._pipeline)
        self._added = [each for each in changes if each not in self._changes and self.checked.loads > 1]
        amended = [each.step for each in self._pipeline.amendments if ("an amendment", str(each)) in self._added]
        self._reach = min([self._reach, *amended, *(each.first_step for each in stages[self._num_stages :])])
        self._changes, self._num_stages = changes, len(stages)
        sizes, hosts = self._pipeline.sampler.batch_sizes.sizes, _number(fields.get("hosts"))
        if hosts < 1 or all(rows % hosts for rows in sizes):  # steps of other sizes may have had another number
            rows = " or ".join(map(str, sizes))
            self._report(f"hosts={fields.get('hosts')}; expected a number that divides {rows} rows.")
        self._compare(fields, self._events.load(hosts), {"hosts"})
        self._loaded, self._running = True, self._reach < 0
        if self._running:  # a log that begins at step 0 has no resume
            self._continue_at(0)

    def _resume(self, fields: Mapping[str, str]) -> None:
        self.checked.resumes += 1
        step, end = _number(fields.get("step")), self._pipeline.end_step
        if not 0 <= step < end:
            self._lose_step(f"step={fields.get('step')}; expected 0 to {end - 1}.")
            return
        if step and self.checked.entries == self.checked.loads + 1:
            self._note(f"the log begins at step {step}, so earlier steps are not checked.")
        elif step > self._reach and not self._lost:
            missing = f"no line states that steps {self._reach} to {step - 1} were handed out"
            self._report(f"step={step}, but {missing}; expected at most {self._reach}.")
        for kind, text in self._added:
            if begins_before(step, [text]):
                added = shown(kind, text)
                self._report(f"the run continues at step {step} with {kind} that it did not have before: {added}.")
        self._added, self._running = [], True
        if self._compare(fields, self._events.resume(step)):
            self._lost = False
            self._continue_at(step)
        else:
            self._lose_step()

    def _event(self, fields: Mapping[str, str]) -> None:
        if not self._running:
            self._report(f"action={fields['action']} after {LOAD} in a continued log; expected {RESUME} before it.")
            self._running = True
        event, named = self._next, self._named(fields)
        if named is None or named != event:
            if not self._lost:
                expected = f"{event.action} of epoch {event.epoch} at step {event.step}" if event else "no more events"
                self._report(f"action={fields['action']} of epoch {fields.get('epoch')}; expected {expected}.")
            self._lost = named is None or not self._lost
            if named is None:
                return
            self._upcoming = self._events.following(named.step)
            while self._next != named:
                self._advance()
        self._delivered = named.step
        unknown = {"since_step"} if self._since is None else set()
        self._compare(fields, self._events.entry(named, self._since or 0), unknown)
        if named.action == COMPLETE:
            self.checked.epochs.add(named.epoch)
        self._advance()

    def _named(self, fields: Mapping[str, str]) -> Event | None:
        """Return the event with the action, stage, source and epoch of a line; None if the run has no such event."""
        epoch = _number(fields.get("epoch"))
        for number, (stage, _, stream) in enumerate(self._events.streams):
            same_source = fields.get("source") == (as_text(stream.name) if stream.name else None)
            same = same_source and fields.get("stage") == (None if stage is None else str(stage))
            if epoch >= 0 and same and (span := stream.span(epoch)) is not None:
                step = span.first if fields["action"] == START else span.last
                return Event(step, fields["action"], epoch, number)
        return None

    def _lose_step(self, message: str = "") -> None:
        """Report `message`, if any, and continue after a changed line, which may have been an entry of any kind."""
        if message:
            self._report(message)
        self._loaded = self._running = self._lost = True
        self._since = None

    def _continue_at(self, step: int) -> None:
        self._since, self._delivered, self._upcoming = step, step - 1, self._events.following(step)
        self._advance()

    def _advance(self) -> None:
        self._next = next(self._upcoming, None)
        self._reach = max(self._reach, self._pipeline.end_step if self._next is None else self._next.step)

    def _compare(self, fields: Mapping[str, str], expected: Mapping[str, Any], unknown: Collection[str] = ()) -> bool:
        """Report the fields that differ from `expected`, except those of `unknown`. Return whether none differs."""
        before = len(self.checked.findings)
        for name in [name for name in expected if name not in _NOT_COMPUTED.union(unknown)]:
            stated, computed = fields.get(name), as_text(expected[name])
            if stated is None:
                self._report(f"has no {name}; expected {name}={computed}.")
            elif stated != computed:
                parts = receipt_parts(stated) if name == "receipt_parts" else {}
                why = " " + " ".join(self._pipeline.receipt.differences(parts)) if parts else ""
                self._report(f"{name}={stated}; expected {computed}.{why}")
        for name in fields.keys() - expected.keys() - _NOT_COMPUTED:
            self._report(f"{name}={fields[name]}; expected no such field.")
        return len(self.checked.findings) == before

    def _report(self, message: str) -> None:
        self.checked.findings.append(Finding(self._number, message))

    def _note(self, message: str) -> None:
        self.checked.notes.append(Finding(self._number, message))


def _checked(run: _Run, pipelines: Sequence[Pipeline], lines: Sequence[Mapping[str, str]]) -> _Run:
    """Return `run` after `lines`, as entries of one of `pipelines`: the one that gives the fewest findings."""
    found = []
    for pipeline in pipelines:
        following = run.as_written_by(pipeline)
        for fields in lines:
            following.check(fields)
        if len(following.checked.findings) == len(run.checked.findings):
            return following
        found.append(following)
    return min(found, key=lambda each: len(each.checked.findings))
