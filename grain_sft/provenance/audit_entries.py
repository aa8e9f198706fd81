"""Entries of an audit log: the steps at which epochs start and are complete, the fields, and their lines.

A line is JSON, or text in the format of the episode-indexed loader:
2026-01-03T16:44:19.629Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | ... | entry=2"""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from grain_sft.pipeline import Pipeline, layout_receipt
from grain_sft.version import __version__

Fields = dict[str, Any]

VERSION = 1  # of the fields
LOAD, RESUME, START, COMPLETE = "dataset_load", "resume", "epoch_start", "epoch_complete"

_SHOWN = 10  # rows of an epoch's order
# `entry`, the last field, is the number of the line in its file. Logs before version 0.2 have a hash `chain` after it, which is
# ignored: it had no key, so who changed a line could compute it again.
CUT = b" | half written"
"""End of a line that a process did not finish, appended by the next process that writes to the file."""

_CHANNEL = "TRAINING | INFO"
_BARE = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


class Event(NamedTuple):
    """An epoch of one of the sampler's streams that starts, or is complete, with the batch of `step`."""

    step: int
    action: str
    epoch: int
    stream: int = 0


class Events:
    """The events of a pipeline, and their entries.

    An epoch starts with the step of its first row, and is complete with the step of its last row, not counting rows that the
    sampler drops because they don't fill a batch. Where batches straddle epochs, one epoch is complete and the next starts in
    the same step. The last epoch of a run is complete with its last step, though with fewer rows where these don't fill a
    batch.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self.streams = pipeline, pipeline.sampler.streams
        self._receipt = {"receipt": pipeline.receipt.code}

    def following(self, step: int) -> Iterator[Event]:
        """Return the events from `step` on, in order; without end where the epochs never end."""
        if step >= self._pipeline.end_step:
            return iter(())
        streams = (self._of(number, step) for number in range(len(self.streams)))
        return heapq.merge(*streams, key=lambda event: event.step)

    def _of(self, number: int, step: int) -> Iterator[Event]:
        stream = self.streams[number]
        epoch, _ = stream.begin(step)
        while (span := stream.span(epoch)) is not None:
            for at, action in ((span.first, START), (span.last, COMPLETE)):
                if at >= step:
                    yield Event(at, action, epoch, number)
            epoch += 1

    def load(self, hosts: int) -> Fields:
        """Return the entry of a process that begins a run on `hosts` hosts."""
        sampler, layout = self._pipeline.sampler, self._pipeline.source.layout
        sources = [stream.source for stream in self.streams]
        names = {"epoch_seed": "seed", "epoch_shuffle": "shuffle", "order": "order"}
        fields: Fields = {field: [getattr(source, name) for source in sources] for field, name in names.items()}
        if sampler.steps_per_epoch is not None:
            fields = {field: values[0] for field, values in fields.items()}
            fields |= {"steps_per_epoch": sampler.steps_per_epoch, "epochs": sampler.epochs}
        else:
            fields = {"sources": [stream.name for stream in self.streams], **fields}
            fields["rows_of_sources"] = [source.num_instances for source in sources]
            fields["epochs"] = [source.epochs for source in sources]
        return {
            "action": LOAD,
            "audit_version": VERSION,
            "grain_sft": __version__,
            **fields,
            "num_episodes": sampler.num_instances,
            "num_rows": sampler.num_instances,
            "sequence_length": layout.sequence_length,
            "global_batch_size": sampler.global_batch_size,
            "hosts": hosts,
            "corpus": layout.corpus.ends_fingerprint,
            "layout": layout_receipt(layout),
            "receipt_parts": self._pipeline.receipt.parts,
            **self._receipt,
        }

    def resume(self, step: int) -> Fields:
        """Return the entry of batches that continue at `step`, not after the batch before it."""
        begins = {stream.name: stream.begin(step) for stream in self.streams}
        epochs, before = ({name: begin[at] for name, begin in begins.items()} for at in range(2))
        begun = {"step": step, "epoch": epochs.get("", epochs), "epoch_offset": before.get("", before)}
        return {"action": RESUME, **begun, **self._receipt}

    def entry(self, event: Event, since: int) -> Fields:
        """Return the entry of an event in a run whose batches began at step `since`."""
        stream, epoch = self.streams[event.stream], event.epoch
        fields: Fields = {"action": event.action, **({"source": stream.name} if stream.name else {}), "epoch": epoch}
        seed, step = stream.source.epoch_seed(epoch), {"step": event.step, **self._receipt}
        if event.action == START:
            rows = stream.first_rows(epoch, _SHOWN).tolist()
            documents, part = rows, self._pipeline.source.layout.parts[stream.name]
            if part.one_segment and part.follows_documents:
                documents = [part.spans(row)[0].document for row in rows]
            shown = {"first_episode_ids": documents, "first_rows": rows, "num_episodes": stream.source.num_instances}
            return {**fields, "seed": seed, **shown, **step}
        span = stream.span(epoch)
        assert span is not None
        seen = {"episodes_seen": span.rows, "rows_seen": span.rows}
        begun = {"first_step": span.first, "since_step": max(span.first, since)}
        return {**fields, "seed_used": seed, **seen, **begun, **step}


def text_line(time: str, fields: Fields) -> str:
    """Return an entry as a line of text, without its newline."""
    return " | ".join([time, _CHANNEL, *(f"{name}={as_text(value)}" for name, value in fields.items())])


FORMATS: dict[str, Callable[[str, Fields], str]] = {
    ".log": text_line,
    ".jsonl": lambda time, fields: json.dumps({"time": time, **fields}),
}
"""Writer of a line, without its newline, by the suffix of the file."""


def read_line(line: bytes) -> dict[str, str]:
    """Return the fields of a line, each as `as_text` writes its value, or raise ValueError where it is not an entry."""
    text = line.decode()
    if text.startswith("{"):
        parsed = json.loads(text)
        fields, time = {name: as_text(value) for name, value in parsed.items()}, parsed.get("time")
    else:
        time, *channel = text.split(" | ", 3)[:3]
        rest = text[len(" | ".join([time, *channel])) :]
        found = _FIELD.findall(rest)
        if " | ".join(channel) != _CHANNEL or rest != "".join(f" | {name}={value}" for name, value in found):
            raise ValueError("it does not have the form 'time | TRAINING | INFO | name=value | ...'")
        fields = {"time": as_text(time), **dict(found)}
    if not isinstance(time, str) or not _TIME.fullmatch(time) or "action" not in fields:
        raise ValueError("it has no time such as 2026-01-03T16:44:19.628Z, or no action")
    return fields


def as_text(value: object) -> str:
    """Return a value as a line of text holds it: lists and objects as JSON in quotes."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    if isinstance(value, (list, dict)):
        return json.dumps(json.dumps(value))
    return json.dumps(value)
