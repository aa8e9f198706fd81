"""AuditLog: log of the epochs that a run reads and of its restarts, written during the run.

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

CUT = b" | half written"
"""End of an unfinished line. The next process that writes to the file appends it."""

_CHANNEL = "TRAINING | INFO"
_UNQUOTED = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def _text_line(time: str, fields: Fields) -> str:
    return " | ".join([time, _CHANNEL, *(f"{name}={as_text(value)}" for name, value in fields.items())])


def _json_line(time: str, fields: Fields) -> str:
    return json.dumps({"time": time, **fields})


FORMATS: dict[str, Callable[[str, Fields], str]] = {".log": _text_line, ".jsonl": _json_line}
"""By the suffix of a file: function that returns an entry as a line of this file, without the newline."""


def read_line(line: bytes) -> dict[str, str]:
    """Return the fields of a line, with values in the form of `as_text`. Raise ValueError for a line that is not an entry."""
    text = line.decode()
    if text.startswith("{"):
        parsed = json.loads(text)
        fields, time = {name: as_text(value) for name, value in parsed.items()}, parsed.get("time")
    else:
        time, _, after_time = text.partition(" | ")
        named_values = _FIELD.findall(after_time.removeprefix(_CHANNEL))
        if after_time != _CHANNEL + "".join(f" | {name}={value}" for name, value in named_values):
            raise ValueError("it does not have the form 'time | TRAINING | INFO | name=value | ...'")
        fields = {"time": as_text(time), **dict(named_values)}
    if not isinstance(time, str) or not _TIME.fullmatch(time) or "action" not in fields:
        raise ValueError("it has no time such as 2026-01-03T16:44:19.628Z, or no action")
    return fields


def as_text(value: object) -> str:
    """Return the form of a value in a line of text. Lists and objects become JSON in quotes."""
    if isinstance(value, str):
        return value if _UNQUOTED.fullmatch(value) else json.dumps(value)
    if isinstance(value, (list, dict)):
        return json.dumps(json.dumps(value))
    return json.dumps(value)


class AuditLog(Observer):
    """Audit log of the batches that the trainer gets.

    A log has four kinds of entries:
      dataset_load: A process reads its first batch. Or the log was moved away during the run, and a new file begins.
      resume: A batch does not follow the batch before it.
      epoch_start, epoch_complete: A batch has the first, or the last, row of an epoch.
    The last field of an entry, `entry`, is the number of its line in the file. Only host 0 writes. A batch that was read ahead,
    but that the trainer never gets, leaves no entry.

    Args:
      path: Local path. The suffix `.log` selects lines of text, and `.jsonl` JSON. With another suffix or none, both files are
        written. Entries are appended to existing files.

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
        self._next = -1  # step of the next batch, if the run is not interrupted
        self._next_entry_step = -1  # first step from `_next` on that has entries
        self._unwritten_step = -1  # step whose entries are in `_waiting`; -1 if all are written
        self._recorded: Delivery | None = None  # last delivery whose entries are written
        self._since = 0  # step at which the run was begun or resumed
        self._events: Events | None = None

    @property
    def paths(self) -> list[str]:
        """Paths of the files that are written."""
        return list(self._waiting)

    def batch_handed_out(self, delivery: Delivery) -> None:
        """Write the entries of the batch that the trainer gets now. A second call with the same delivery writes nothing.

        Ctrl-C may raise an exception between any two statements. So attributes that belong together change in one assignment.

        Raises:
          StorageError: A file can't be written. A second call for the step writes what is missing.
        """
        with self._lock:
            step = delivery.step
            if delivery is self._recorded:
                return
            if step == self._next and step < self._next_entry_step:
                self._next, self._recorded = step + 1, delivery
            elif delivery.writer:
                self._write(delivery.pipeline, step, delivery)

    def _write(self, pipeline: Pipeline, step: int, delivery: Delivery) -> None:
        """Write the entries of `step`. If an earlier call for `step` failed, write only what that call did not write."""
        if step != self._unwritten_step:
            events, since, entries = self._entries(pipeline, step)
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            added = [(time, fields) for fields in entries]
            waiting = {path: before + added for path, before in self._waiting.items()}
            self._waiting, self._events, self._since, self._unwritten_step = waiting, events, since, step
        for path, lines in self._waiting.items():
            _append(path, lines)
        assert self._events is not None
        following = next(self._events.following(step + 1), None)
        entry_step = pipeline.end_step if following is None else following.step
        self._unwritten_step, self._next, self._next_entry_step, self._recorded = -1, step + 1, entry_step, delivery

    def _entries(self, pipeline: Pipeline, step: int) -> tuple[Events, int, list[Fields]]:
        """Return the values of `_events` and `_since` from `step` on, and the entries of `step`."""
        existing = [os.path.exists(path) and os.path.getsize(path) > 0 for path in self._waiting]
        loads = self._events is None or not all(existing)  # a file may have been moved away during the run
        run_is_new = self._events is None and not any(existing) and step == 0
        events = self._events or Events(pipeline)
        jumps = loads or step != self._next
        since = step if jumps else self._since
        entries = [events.load(pipeline.sampler.host.count)] if loads else []
        if jumps and not run_is_new:
            entries.append(events.resume(step))
        for event in itertools.takewhile(lambda event: event.step == step, events.following(step)):
            entries.append(events.entry(event, since))
        return events, since, entries

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.path,)  # the copy in a worker process delivers no batches and writes nothing


def _append(path: str, waiting: list[tuple[str, Fields]]) -> None:
    """Append all entries to a file, sync it and clear `waiting`. If this raises, the file and `waiting` are unchanged."""
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
    """Yield the descriptor of a file under a lock that excludes other writers. An OSError in the context is a StorageError."""
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(os.close, fd)
            with contextlib.suppress(OSError):  # some file systems have no locks; one writer is safe without
                cleanup.callback(HeldLock(os.dup(fd)).release)
            yield fd
    except OSError as error:
        reason = f"the audit log can't be written ({error.strerror or error})"
        raise StorageError(f"{path}: {reason}. Make room, or give another path.") from error
