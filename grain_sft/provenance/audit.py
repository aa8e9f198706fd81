"""AuditLog: record of the data that a run was given, written during the run.

A line is JSON, or text in the form of the episode-indexed loader:
2026-01-03T16:44:19.629Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | ... | entry=2
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

from grain_sft.errors import PipelineError, StorageError
from grain_sft.pipeline import Delivery, Observer, Pipeline
from grain_sft.provenance.events import Events, Fields
from grain_sft.storage import HeldLock, files

# The last field, `entry`, is the number of the line in its file. Logs before version 0.2 have a hash `chain` after it. It is
# ignored, because a change of a line can include its hash.
CUT = b" | half written"
"""End of an unfinished line. The next process that writes to the file appends it."""

_CHANNEL = "TRAINING | INFO"
_BARE = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


FORMATS: dict[str, Callable[[str, Fields], str]] = {
    ".log": lambda time, fields: " | ".join(
        [time, _CHANNEL, *(f"{key}={as_text(each)}" for key, each in fields.items())]
    ),
    ".jsonl": lambda time, fields: json.dumps({"time": time, **fields}),
}
"""Writer of a line, without its newline, by the suffix of the file."""


def read_line(line: bytes) -> dict[str, str]:
    """Return the fields of a line, with values in the form of `as_text`. Raise ValueError for a line that is not an entry."""
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
    """Return the form of a value in a line of text. Lists and objects become JSON in quotes."""
    if isinstance(value, str):
        return value if _BARE.fullmatch(value) else json.dumps(value)
    if isinstance(value, (list, dict)):
        return json.dumps(json.dumps(value))
    return json.dumps(value)


class AuditLog(Observer):
    """The audit log of a pipeline's batches.

    There are four kinds of entries. `dataset_load` is written once per process, with its first batch, and again if the log was
    moved away. `resume` is written where a batch is not the successor of the last one. `epoch_start` and `epoch_complete` are
    written with the first and the last batch of an epoch. Only host 0 writes, and only batches that the trainer was given:
    batches that were only read ahead leave no entry.

    Args:
      path: Local path. A suffix `.log` or `.jsonl` selects one format; without it, both files are written. Entries are
        appended to existing files.

    Raises:
      PipelineError: The path is remote.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.absolute(files.normalize(path))
        if files.is_remote(self.path):
            reason = "lines can't be added to a file in a bucket. Copy the log there when the run has ended"
            raise PipelineError(f"audit={self.path!r}: expected a local path: {reason}.")
        paths = [self.path] if self.path.endswith(tuple(FORMATS)) else [self.path + suffix for suffix in FORMATS]
        self._waiting: dict[str, list[tuple[str, Fields]]] = {path: [] for path in paths}  # entries to write, by file
        self._lock = threading.RLock()
        self._next = -1  # next step of an uninterrupted run
        self._quiet_until = -1  # no entry is due from `_next` up to this step
        self._pending = -1  # step whose entries are not all written
        self._recorded: Delivery | None = None
        self._since = 0  # first step of the uninterrupted run
        self._events: Events | None = None

    @property
    def paths(self) -> list[str]:
        """Paths of the files that are written."""
        return list(self._waiting)

    def batch_handed_out(self, delivery: Delivery) -> None:
        """Write the entries of the batch that the trainer gets now. A second call with the same delivery records nothing.

        Ctrl-C may raise an exception at any point in here, so state changes by single assignments.

        Raises:
          StorageError: A file can't be written. A second call for the same step writes the missing entries.
        """
        with self._lock:
            step = delivery.step
            if delivery is self._recorded:
                return
            if step == self._next and step < self._quiet_until:
                self._next, self._recorded = step + 1, delivery
            elif delivery.writer:
                self._write(delivery.pipeline, step, delivery)

    def _write(self, pipeline: Pipeline, step: int, delivery: Delivery) -> None:
        if step != self._pending:
            events, since, entries = self._entries(pipeline, step)
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            added = [(time, fields) for fields in entries]
            waiting = {path: before + added for path, before in self._waiting.items()}
            self._waiting, self._events, self._since, self._pending = waiting, events, since, step
        for path, lines in self._waiting.items():
            _append(path, lines)
        assert self._events is not None
        following = next(self._events.following(step + 1), None)
        quiet_until = pipeline.end_step if following is None else following.step
        self._pending, self._next, self._quiet_until, self._recorded = -1, step + 1, quiet_until, delivery

    def _entries(self, pipeline: Pipeline, step: int) -> tuple[Events, int, list[Fields]]:
        """Return the events, the first step of the uninterrupted run, and the entries of `step`."""
        existing = [os.path.exists(path) and os.path.getsize(path) > 0 for path in self._waiting]
        begins = self._events is None or not all(existing)  # true again if a file was moved away during the run
        again = self._events is not None or any(existing)
        events = self._events or Events(pipeline)
        jumps = begins or step != self._next
        since = step if jumps else self._since
        entries = [events.load(pipeline.sampler.host.count)] if begins else []
        if jumps and (again or step):
            entries.append(events.resume(step))
        for event in itertools.takewhile(lambda event: event.step == step, events.following(step)):
            entries.append(events.entry(event, since))
        return events, since, entries

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.path,)  # the copy in a worker process delivers no batches and writes nothing


def _append(path: str, waiting: list[tuple[str, Fields]]) -> None:
    """Append all entries to a file in one synced write and clear `waiting`. If this raises, neither happens."""
    if not waiting:
        return
    with _locked(path) as fd:
        size = os.fstat(fd).st_size
        before = os.pread(fd, size, 0)
        data = CUT + b"\n" if size and not before.endswith(b"\n") else b""
        line = FORMATS["." + path.rpartition(".")[2]]
        for number, (time, fields) in enumerate(waiting, (before + data).count(b"\n") + 1):
            data += line(time, {**fields, "entry": number}).encode() + b"\n"
        try:
            written = os.write(fd, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written; is the disk full?")
            os.fsync(fd)
            if not size:
                files.sync_folder(Path(path).parent)
            waiting.clear()
        except BaseException:  # also Ctrl-C
            if waiting:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
            raise


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Yield the descriptor of a file under a lock that excludes other writers. Errors become a `StorageError`."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as undone:
            undone.callback(os.close, fd)
            with contextlib.suppress(OSError):  # a file system without locks is safe with one writer
                undone.callback(HeldLock(os.dup(fd)).release)
            yield fd
    except OSError as error:
        reason = f"the audit log can't be written ({error.strerror or error})"
        raise StorageError(f"{path}: {reason}. Make room, or give another path.") from error
