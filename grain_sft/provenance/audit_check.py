"""Checks of an audit log: everything that it says is computed again from the pipeline, and compared."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from grain_sft.errors import CorpusError
from grain_sft.provenance.audit_events import COMPLETE, LOAD, RESUME, START, Event, Events
from grain_sft.provenance.audit_line import FIRST_CHAIN, Fields, Seal, as_text, chain_of, lines_of, read_line, seal_of
from grain_sft.sampling import Host, IndexSampler, MixtureSampler
from grain_sft.storage import files

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

_NOT_COMPUTED = ("time", "entry", "chain", "grain_sft")
_UNKNOWN = frozenset(["since_step"])  # where a line that was changed says it
_WRONG_IN_A_ROW = 8  # lines whose chains were changed, after which the next is still known to be right
_HALF = "was being written when its process ended."
_NO_ENTRY = "is no entry, nor one that was being written when its process ended: it was changed, or added."


@dataclasses.dataclass(frozen=True)
class Finding:
    """What line `line` of a log (counted from 1) says that is not so."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclasses.dataclass
class Checked:
    """What came of a check.

    Attributes:
      findings: contradictions; none where the log is as the pipeline would have it.
      notes: what is no contradiction, and worth knowing.
      entries, loads, resumes: how many there are.
      epochs: that were complete.
      receipt: of the pipeline.
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
        """Whether nothing in the log is other than the pipeline's batches."""
        return not self.findings


def check_audit(path: str | os.PathLike[str], pipeline: Pipeline) -> Checked:
    """Compare an audit log, text or JSONL, with the pipeline whose batches it is said to be of.

    Args:
      pipeline: of any host. Where an order depends on how many there are, the log says how many there were.

    Raises:
      CorpusFileError: the log can't be read.
      CorpusError: it is empty.
    """
    data = files.read_bytes(files.normalize(path))
    if not data:
        raise CorpusError(f"{os.fspath(path)}: is empty. A run writes its audit log when it is given its first batch.")
    pipeline = _of_hosts(pipeline, _hosts(data))
    checked = Checked(receipt=pipeline.receipt.code)
    run = _Run(pipeline, checked)
    for number, line, problem in _lines(data, checked, run):
        try:
            fields = read_line(line)
        except (ValueError, RecursionError) as error:
            checked.findings.append(Finding(number, f"can't be read: {error}. It was changed, or is of another log."))
            run.lose()
            continue
        run.check(number, fields, sound=not problem)
        if problem:
            checked.findings.append(Finding(number, problem))
    if not checked.entries and not checked.findings:
        checked.findings.append(Finding(1, "there is no entry of an audit log in this file."))
    checked.findings.sort(key=lambda finding: finding.line)
    return checked


def _hosts(data: bytes) -> int:
    """The hosts of a run, as the first line of its log that has them says; 0 where none does."""
    for line in lines_of(data):
        try:
            fields = read_line(line)
        except (ValueError, RecursionError):
            continue
        if fields["action"] == LOAD:
            return _number(fields.get("hosts"))
    return 0


def _of_hosts(pipeline: Pipeline, count: int) -> Pipeline:
    """The pipeline with so many hosts, where that makes other batches and there can be so many."""
    sampler = pipeline.sampler
    if (
        isinstance(sampler, MixtureSampler)
        or sampler.order != "maxtext"
        or count < 1
        or sampler.global_batch_size % count
    ):
        return pipeline
    of_hosts = IndexSampler(**sampler.__getstate__() | {"host": Host(0, count)})
    return type(pipeline)(pipeline.source, of_hosts, pipeline.transforms)


def _lines(data: bytes, checked: Checked, run: _Run) -> Iterator[tuple[int, bytes, str]]:
    """(number, line, what is wrong with its place in the chain) of each sealed line."""
    previous, entries = {FIRST_CHAIN}, {0}  # after a line that was changed: what it says, and what it should have said
    halves: list[int] = []  # lines without a seal, since the last that has one
    since = b""
    lines = lines_of(data)
    for number, line in enumerate(lines, 1):
        seal = seal_of(line)
        if seal is None:
            halves.append(number)
            since += line + b"\n"
            continue
        body = line[: seal.covered]
        expected = {chain_of(chain, since + body) for chain in previous}
        entry = seal.entry - 1 if seal.entry - 1 in entries else max(entries)
        problem = "" if seal.chain in expected and seal.entry == entry + 1 else _broken(seal, entry)
        if not problem:
            checked.notes += [Finding(half, _HALF) for half in halves]
        elif halves:
            checked.findings += [Finding(half, _NO_ENTRY) for half in halves]
            run.lose()
            added = seal.chain in {chain_of(chain, body) for chain in previous}
            if added or seal.entry == entry + 1 + len(halves):  # else they were entries before they were changed
                problem = ""
        yield number, line, problem
        previous, entries = {seal.chain}, {seal.entry}
        if problem:
            previous |= expected if len(expected) < _WRONG_IN_A_ROW else set()
            entries.add(entry + 1)
        halves, since = [], b""
    for half in halves:
        cut = half == len(lines) and not data.endswith(b"\n")
        (checked.notes if cut else checked.findings).append(Finding(half, _HALF if cut else _NO_ENTRY))


def _broken(seal: Seal, before: int) -> str:
    """Why the seal of a line may not fit after the entry `before`."""
    if seal.entry > before + 1:
        missing = (
            f"entry {before + 1} is" if seal.entry == before + 2 else f"entries {before + 1} to {seal.entry - 1} are"
        )
        return f"is entry {seal.entry} and follows entry {before}: {missing} missing, or this line was changed."
    if seal.entry <= before:
        return f"is entry {seal.entry} and follows entry {before}: it was added or moved, or changed."
    return f"chain={seal.chain} is not that of what it says and of what was written before: it was changed."


class _Run:
    """How far a run has come, by the lines of its log up to one of them."""

    def __init__(self, pipeline: Pipeline, checked: Checked) -> None:
        self._pipeline, self._checked = pipeline, checked
        self._events = Events(pipeline)
        self._steps = pipeline.end_step
        self._upcoming: Iterator[Event] = iter(())
        self._next: Event | None = None
        self._since: int | None = 0  # step at which batches began; None: the line that says it was changed
        self._loaded = self._running = False
        self._lost = False  # after a line that was changed: the next event says where the run is
        self._reach = -1  # every step below it may have been handed out; -1: nothing was
        self._number = 0

    def lose(self) -> None:
        """Go on after a line that is known to be wrong, and may have been any."""
        self._loaded = self._running = self._lost = True
        self._since = None

    def check(self, number: int, fields: Mapping[str, str], sound: bool) -> None:
        """Compare the next line with what a run may say there, and with what it must say.

        Args:
          sound: whether it is as it was written, by its chain.
        """
        self._number = number
        self._checked.entries += 1
        action = fields["action"]
        kinds = {LOAD: self._load, RESUME: self._resume, START: self._event, COMPLETE: self._event}
        before = len(self._checked.findings)
        if action not in kinds:
            self._found(f"action={action}; expected one of {', '.join(kinds)}.")
            self.lose()
            return
        if action != LOAD and not self._loaded:
            self._found(f"action={action} before any {LOAD}; expected {LOAD} first.")
            self._loaded = True
        kinds[action](fields)
        if not sound and action in (LOAD, RESUME) and len(self._checked.findings) > before:
            self.lose()

    def _load(self, fields: Mapping[str, str]) -> None:
        self._checked.loads += 1
        sizes, hosts = self._pipeline.sampler.batch_sizes.sizes, _number(fields.get("hosts"))
        if hosts < 1 or all(rows % hosts for rows in sizes):
            self._found(
                f"hosts={fields.get('hosts')}; expected a number that divides {' or '.join(map(str, sizes))} rows."
            )
        self._compare(fields, self._events.load(hosts), {"hosts"})
        self._loaded, self._running = True, False
        if self._reach < 0:  # a log that begins at the beginning says no resume
            self._go(0)
            self._running = True

    def _resume(self, fields: Mapping[str, str]) -> None:
        self._checked.resumes += 1
        step = _number(fields.get("step"))
        first = self._checked.entries == self._checked.loads + 1
        if not 0 <= step < self._steps:
            self._found(f"step={fields.get('step')}; expected 0 to {self._steps - 1}.")
            self.lose()
            return
        if first and step:
            note = f"the log begins at step {step}: it says nothing of those before."
            self._checked.notes.append(Finding(self._number, note))
        elif step > self._reach and not self._lost:
            self._found(
                f"step={step}, but no line says that steps {self._reach} to {step - 1} were handed out; expected "
                f"{self._reach} at most."
            )
        self._compare(fields, self._events.resume(step))
        self._running, self._lost = True, False
        self._go(step)

    def _event(self, fields: Mapping[str, str]) -> None:
        if not self._running:
            self._found(f"action={fields['action']} after {LOAD} in a log that goes on; expected {RESUME} before it.")
            self._running = True
        if self._lost:
            self._find(fields)
        event = self._next
        if event is None:
            self._found(f"action={fields['action']}; expected nothing more of this run after its last step.")
            return
        if fields["action"] != event.action:
            self._found(
                f"action={fields['action']}; expected {event.action} of epoch {event.epoch}, at step {event.step}."
            )
            self._advance()
            event = self._next
            if event is None or not _is(event, fields, self._events.lanes[event.lane].name):
                return  # this line was changed; else one is missing, and this is the next
        self._compare(
            fields, self._events.entry(event, self._since or 0), set() if self._since is not None else _UNKNOWN
        )
        if event.action == COMPLETE:
            self._checked.epochs.add(event.epoch)
        self._advance()

    def _find(self, fields: Mapping[str, str]) -> None:
        """Find the event that a line says, wherever the run is."""
        step = _number(fields.get("step"))
        if not 0 <= step < self._steps:
            return
        for event in itertools.takewhile(lambda event: event.step == step, self._events.following(step)):
            if _is(event, fields, self._events.lanes[event.lane].name):
                self._lost, self._next, self._upcoming = False, None, self._events.following(step)
                while self._next != event:
                    self._advance()
                return

    def _go(self, step: int) -> None:
        self._since = step
        self._upcoming = self._events.following(step)
        self._advance()

    def _advance(self) -> None:
        self._next = next(self._upcoming, None)
        self._reach = max(self._reach, self._steps if self._next is None else self._next.step)

    def _compare(self, fields: Mapping[str, str], expected: Fields, unknown: Collection[str] = ()) -> None:
        """Say which fields are not as expected, but for those that are `unknown`."""
        for name, value in expected.items():
            if name in (*_NOT_COMPUTED, *unknown):
                continue
            stated, computed = fields.get(name), as_text(value)
            if stated is None:
                self._found(f"has no {name}; expected {name}={computed}.")
            elif stated != computed:
                self._found(f"{name}={stated}; expected {computed}.{self._why(name, stated)}")
        for name in fields.keys() - expected.keys() - set(_NOT_COMPUTED):
            self._found(f"{name}={fields[name]}; expected no such field.")

    def _why(self, name: str, stated: str) -> str:
        """What is another in receipts."""
        if name != "receipt_parts":
            return ""
        try:
            parts = json.loads(json.loads(stated))
        except (ValueError, TypeError):
            return ""
        return " " + " ".join(self._pipeline.receipt.differences(parts)) if isinstance(parts, dict) else ""

    def _found(self, message: str) -> None:
        self._checked.findings.append(Finding(self._number, message))


def _number(text: str | None) -> int:
    """A number from 0 on; -1 for what is none."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else -1


def _is(event: Event, fields: Mapping[str, str], source: str | None) -> bool:
    stated = (fields.get("step"), fields["action"], fields.get("epoch"), fields.get("source"))
    named = None if source is None else as_text(source)
    return stated == (str(event.step), event.action, str(event.epoch), named)
