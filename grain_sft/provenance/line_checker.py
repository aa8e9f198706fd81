"""LineChecker: checks that each line of an audit log agrees with what the run's pipeline computes."""

import contextlib
import copy
import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, Self

from grain_sft.pipeline import Pipeline, first_step
from grain_sft.provenance.audit import as_text
from grain_sft.provenance.events import COMPLETE, LOAD, RESUME, START, Event
from grain_sft.provenance.run_position import RunPosition

_NOT_COMPUTED = {"time", "entry", "chain", "grain_sft"}  # fields that do not follow from the pipeline


class Finding(NamedTuple):
    """Message about a line of a log. `line` is the number of that line, from 1."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


@dataclasses.dataclass
class Checked:
    """Result of a check.

    Attributes:
      findings: Messages about lines that contradict the pipeline.
      notes: Messages about other lines, such as an unfinished line.
      entries: Number of lines that are entries. A line that is unfinished or can't be read is not an entry.
      loads, resumes: Number of entries with the action `dataset_load`, and with the action `resume`.
      epochs: Epochs that the log states as complete, as pairs (index of the stream in `Events.streams`, number of the epoch).
      receipt: Code of the pipeline's receipt.
    """

    findings: list[Finding] = dataclasses.field(default_factory=list)
    notes: list[Finding] = dataclasses.field(default_factory=list)
    entries: int = 0
    loads: int = 0
    resumes: int = 0
    epochs: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    receipt: str = ""

    @property
    def accepted(self) -> bool:
        """Whether nothing in the log contradicts the pipeline's batches."""
        return not self.findings


class Change(NamedTuple):
    """Amendment or later stage of a run. `text` is its text in the receipt."""

    kind: str  # "an amendment" or "a stage"
    first_step: int
    text: str

    def __str__(self) -> str:
        """Return the text for a message: the whole text of an amendment, or only "from step 100" of a stage."""
        return self.text.partition(":")[0] if self.kind == "a stage" else self.text


def changes_of(pipeline: Pipeline) -> list[Change]:
    """Return the amendments of a run, then its stages after the first, even those whose steps are all skipped."""
    texts = [("an amendment", str(amendment)) for amendment in pipeline.amendments]
    texts += [("a stage", text) for text in pipeline.later_stages]
    return [Change(kind, first_step(text), text) for kind, text in texts]


class LineChecker:
    """Checker of the lines of an audit log, from the first to the last. `checked` is the result so far.

    The checker compares each entry with the entry that the run would write next. After a missing or changed line, it continues
    at the step that the next intact line states. So one mistake in the log causes about one finding.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.checked = Checked(receipt=pipeline.receipt.code)
        self._pipeline = pipeline
        self._position = RunPosition(pipeline)
        self._needed: str | None = LOAD  # action that the next entry must have: LOAD or RESUME; None allows any action
        self._line = 0  # number of the line that is checked, from 1
        # Accepted values of (field `entry` - `_line`). In a log that has lost its third line, line 3 has entry=4: a shift of 1.
        self._shifts = {0}
        self._changes = changes_of(pipeline)  # amendments and stages of the run at the last load
        self._added: list[Change] = []  # amendments and stages that the last load has, and the load before it lacks

    def as_written_by(self, pipeline: Pipeline) -> Self:
        """Return a copy of this checker that compares the next lines with `pipeline`, a version of the run."""
        copied = copy.copy(self)
        copied.checked = copy.deepcopy(self.checked)
        copied._pipeline = pipeline
        copied._position = self._position.in_version(pipeline)
        return copied

    def check(self, fields: Mapping[str, str]) -> None:
        """Check the next line. Its `fields` are {} if it is unfinished, and {"unreadable": reason} if it is not an entry."""
        self._line += 1
        if not fields:
            self._note("was being written when its process ended.")
            return
        if "unreadable" in fields:
            self._lose_step(f"can't be read: {fields['unreadable']}. The line was changed or added.")
            return
        self._check_entry_number(fields)
        self.checked.entries += 1
        action = fields["action"]
        kinds = {LOAD: self._load, RESUME: self._resume, START: self._event, COMPLETE: self._event}
        if action not in kinds:
            self._lose_step(f"action={action}; expected one of {', '.join(kinds)}.")
            return
        if action != LOAD and self._needed == LOAD:
            self._lose_step(f"action={action} before any {LOAD}; expected {LOAD} first.")
        kinds[action](fields)

    def _check_entry_number(self, fields: Mapping[str, str]) -> None:
        """Report a field `entry` that does not fit the line's number and the numbers of earlier entries."""
        number = natural_number(fields.get("entry"))
        shift = number - self._line
        if shift in self._shifts:
            self._shifts = {shift}
        elif "chain" not in fields:  # in older logs, which have `chain`, `entry` does not count unfinished lines
            reason = "A line before this line is missing, or this line was changed, added or moved."
            self._report(f"entry={fields.get('entry')}; expected {self._line + min(self._shifts)}. {reason}")
            if number >= 0:
                self._shifts = self._shifts | {shift}  # the next intact line shows which of the shifts is right

    def check_end(self, pipeline: Pipeline) -> None:
        """Report each amendment or stage of `pipeline` that the last load lacks, if its first step was delivered."""
        for change in changes_of(pipeline):
            if change not in self._changes and change.first_step <= self._position.delivered:
                without = f"without {change.kind} of the config: {change}"
                self._report(f"steps up to {self._position.delivered} were handed out {without}.")

    def _load(self, fields: Mapping[str, str]) -> None:
        """Check an entry `dataset_load`, and begin the run at step 0 if no line before has begun it."""
        self.checked.loads += 1
        self._note_changes()
        sizes = self._pipeline.sampler.batch_sizes.sizes
        hosts = natural_number(fields.get("hosts"))
        # `hosts` need not divide all sizes: a run may change its number of hosts with its batch size
        if hosts <= 0 or all(rows % hosts for rows in sizes):
            rows = " or ".join(map(str, sizes))
            self._report(f"hosts={fields.get('hosts')}; expected a number that divides {rows} rows.")
        self._compare(fields, self._position.events.load(hosts), {"hosts"})
        self._needed = RESUME
        if self._position.max_resume_step < 0:
            # a resume follows only if the run begins after step 0, so none is needed
            self._needed = None
            self._position.continue_at(0)

    def _note_changes(self) -> None:
        """Record the amendments and stages that were added before this load. The run has to resume at or before their steps."""
        changes = changes_of(self._pipeline)
        self._added = [] if self.checked.loads == 1 else [change for change in changes if change not in self._changes]
        for change in self._added:
            self._position.max_resume_step = min(self._position.max_resume_step, change.first_step)
        self._changes = changes

    def _resume(self, fields: Mapping[str, str]) -> None:
        """Check an entry `resume`, and continue at its step if it is valid."""
        self.checked.resumes += 1
        step, end, most = natural_number(fields.get("step")), self._pipeline.end_step, self._position.max_resume_step
        if not 0 <= step < end:
            self._lose_step(f"step={fields.get('step')}; expected 0 to {end - 1}.")
            return
        if step and self.checked.entries == self.checked.loads + 1:  # all entries before this one are loads
            self._note(f"the log begins at step {step}, so earlier steps are not checked.")
        elif step > most and self._position.is_known:
            missing = f"no line states that steps {most} to {step - 1} were handed out"
            self._report(f"step={step}, but {missing}; expected at most {most}.")
        for change in self._added:
            if change.first_step < step:
                self._report(f"the run continues at step {step} with {change.kind} that it did not have before: {change}.")
        self._added = []
        self._needed = None
        if self._compare(fields, self._position.events.resume(step)):
            self._position.is_known = True
            self._position.continue_at(step)
        else:
            self._lose_step()

    def _event(self, fields: Mapping[str, str]) -> None:
        """Check an entry `epoch_start` or `epoch_complete`, and go to the event after it."""
        if self._needed == RESUME:
            self._report(f"action={fields['action']} after {LOAD} in a continued log; expected {RESUME} between them.")
            self._needed = None
        position = self._position
        due, event = position.due, self._event_of(fields)
        if position.is_known and (event is None or event != due):
            expected = f"{due.action} of epoch {due.epoch} at step {due.step}" if due else "no more events"
            self._report(f"action={fields['action']} of epoch {fields.get('epoch')}; expected {expected}.")
        # If the step was known and another event was due, this line or an earlier line is wrong. Then the step is unknown.
        position.is_known = event is not None and (event == due or not position.is_known)
        if event is None:
            return
        position.go_to(event)
        unknown = {"since_step"} if position.since is None else set()
        self._compare(fields, position.events.entry(event, position.since or 0), unknown)
        if event.action == COMPLETE:
            self.checked.epochs.add((event.stream, event.epoch))
        position.pass_event(event)

    def _event_of(self, fields: Mapping[str, str]) -> Event | None:
        """Return the event with the action, stage, source and epoch of a line; None if the run has no such event."""
        epoch = natural_number(fields.get("epoch"))
        stated = fields.get("stage"), fields.get("source")
        for number, (stage, _, stream) in enumerate(self._position.events.streams):
            if stated != (None if stage is None else str(stage), as_text(stream.name) if stream.name else None):
                continue  # the line is about another stream
            # No run reads 2^52 rows. A changed line may state an epoch whose rows `span` can't count.
            span = stream.span(epoch) if 0 <= epoch * stream.source.num_instances < 1 << 52 else None
            if span is None or not span.rows:  # an epoch whose steps are all skipped has no events
                return None
            step = span.first if fields["action"] == START else span.last
            # an epoch that never ends is never complete: `span.last` and `end_step` are both `sys.maxsize`
            return Event(step, fields["action"], epoch, number) if step < self._pipeline.end_step else None
        return None

    def _lose_step(self, message: str = "") -> None:
        """Report `message`, if any. After this wrong line, the step is unknown, and the next line may have any action."""
        if message:
            self._report(message)
        self._needed = self._position.since = None
        self._position.is_known = False

    def _compare(self, fields: Mapping[str, str], expected: Mapping[str, Any], unknown: Collection[str] = ()) -> bool:
        """Report each field that differs from `expected`, except the fields named in `unknown`. Return whether all agree."""
        before = len(self.checked.findings)
        for name in [name for name in expected if name not in _NOT_COMPUTED.union(unknown)]:
            stated, computed = fields.get(name), as_text(expected[name])
            if stated is None:
                self._report(f"has no {name}; expected {name}={computed}.")
            elif stated != computed:
                parts = receipt_parts(stated) if name == "receipt_parts" else {}
                differences = self._pipeline.receipt.differences(parts) if parts else []
                self._report(" ".join([f"{name}={stated}; expected {computed}.", *differences]))
        for name in fields.keys() - expected.keys() - _NOT_COMPUTED:
            self._report(f"{name}={fields[name]}; expected no such field.")
        return len(self.checked.findings) == before

    def _report(self, message: str) -> None:
        self.checked.findings.append(Finding(self._line, message))

    def _note(self, message: str) -> None:
        self.checked.notes.append(Finding(self._line, message))


def natural_number(text: str | None) -> int:
    """Return the value of a decimal number of at most 18 digits; -1 for any other text."""
    return int(text) if text is not None and text.isascii() and text.isdigit() and len(text) < 19 else -1


def receipt_parts(text: str | None) -> dict[str, str]:
    """Return the parts of a receipt from `text`, a field of an entry; an empty dict if it can't be read."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        # parsed twice, because `as_text` dumps objects twice
        return {str(name): str(part) for name, part in dict(json.loads(json.loads(text or ""))).items()}
    return {}
