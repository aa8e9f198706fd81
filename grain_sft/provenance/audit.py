"""AuditLog: a log of the epochs and restarts of a run, written during the run.

A line is JSON or text. Text has the form of the logs of the episode-indexed loader, another input pipeline:
2026-01-03T16:44:19.629Z | TRAINING | INFO | action=epoch_start | epoch=0 | seed=42 | ... | entry=2
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from absl import logging

from grain_sft.errors import PipelineError, StorageError
from grain_sft.pipeline import Delivery, Observer, Run
from grain_sft.provenance.events import Events, Fields
from grain_sft.storage import HeldLock, files

CUT = b" | half written"
"""Text that the next writer appends to a line that a killed process left unfinished."""

_CHANNEL = "TRAINING | INFO"
# strings that need no quotes in a line of text; quotes distinguish all others from numbers, true, false and null
_UNQUOTED = re.compile(r"(?!(?:true|false|null)$)[A-Za-z][A-Za-z0-9_.:/+@-]*")
# name and value of a field; a value is a JSON string, or has no space, no quotation mark and no |
_FIELD = re.compile(r'([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|[^\s"|]+)')
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")


def _text_line(time: str, fields: Fields) -> str:
    return " | ".join([time, _CHANNEL, *(f"{name}={as_text(value)}" for name, value in fields.items())])


def _json_line(time: str, fields: Fields) -> str:
    return json.dumps({"time": time, **fields})


FORMATS: dict[str, Callable[[str, Fields], str]] = {".log": _text_line, ".jsonl": _json_line}
"""By suffix of the log: function that returns the line of an entry, without newline, from the entry's time and fields."""


def read_line(line: bytes) -> dict[str, str]:
    """Return the fields of a line, with values in the form of `as_text`.

    Raises:
      ValueError, RecursionError: The line is not an entry of an audit log.
    """
    text = line.decode()
    if text.startswith("{"):
        parsed = json.loads(text, object_pairs_hook=_distinct)
        fields, time = {name: as_text(value) for name, value in parsed.items()}, parsed.get("time")
    else:
        time, _, after_time = text.partition(" | ")
        named_values = _FIELD.findall(after_time.removeprefix(_CHANNEL))
        if after_time != _CHANNEL + "".join(f" | {name}={value}" for name, value in named_values):
            raise ValueError("it does not have the form 'time | TRAINING | INFO | name=value | ...'")
        fields = _distinct([("time", as_text(time)), *named_values])
    if not isinstance(time, str) or not _TIME.fullmatch(time) or "action" not in fields:
        raise ValueError("it has no time such as 2026-01-03T16:44:19.628Z, or no action")
    return fields


def _distinct(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields as a dict. Raise ValueError if two have the same name."""
    if len(distinct := dict(fields)) != len(fields):
        raise ValueError("it has a field twice")
    return distinct


def as_text(value: object) -> str:
    """Return the form of a value in a line of text. Lists and objects become JSON in quotes."""
    if isinstance(value, str) and _UNQUOTED.fullmatch(value):
        return value
    text = json.dumps(value)
    return json.dumps(text) if isinstance(value, (list, dict)) else text


class AuditLog(Observer):
    """Observer that logs at which steps a run starts, resumes, starts an epoch, and completes an epoch.

    A log has four kinds of entries:
      dataset_load: A process reads its first batch. An `AuditLog` writes this entry again if a file was moved away, or has
        got entries of another writer.
      resume: The run continues in another process, or jumps to a step other than the next one.
      epoch_start, epoch_complete: A batch has the first row, or the last row, of an epoch.
    The last field of an entry, `entry`, is the number of its line in the file. Only the process that has the first row of the
    global batch writes. A batch that was read ahead, but that the trainer never gets, leaves no entry.

    Args:
      path: Local path. The suffix `.log` selects lines of text, and `.jsonl` lines of JSON. With any other path, two files are
        written: the path with `.log`, and the path with `.jsonl`. Entries are appended to existing files. If two runs append to
        one file, each run logs a warning.

    Attributes:
      paths: Paths of the files that are written.

    Raises:
      PipelineError: The path is remote or empty.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.absolute(files.normalize(path))
        if not os.fspath(path):
            raise PipelineError("audit='': expected a local path, such as logs/audit.")
        if files.is_remote(self.path):
            raise PipelineError(f"audit={self.path!r}: expected a local path. Copy the log to a bucket afterwards.")
        self.paths = [self.path] if self.path.endswith(tuple(FORMATS)) else [self.path + suffix for suffix in FORMATS]
        self._ends = [0 for _ in self.paths]  # size of each file after the last entry that this log wrote
        self._lock = threading.RLock()
        self._next = -1  # step of the next batch, unless the run jumps
        self._next_entry_step = -1  # first step from `_next` on that has entries
        self._recorded: Delivery | None = None  # last delivery whose entries are written
        self._since = 0  # step at which the run was begun or resumed
        self._events: Events | None = None

    def batch_handed_out(self, delivery: Delivery) -> None:
        """Write the entries of the delivered step. A second call for the same delivery does nothing.

        Raises:
          StorageError: A file can't be written. Then no file is changed, and another call for the step writes to all files.
        """
        # Ctrl-C may raise an exception between any two statements, so attributes that belong together change in one assignment.
        with self._lock:
            if delivery is self._recorded:
                return
            if delivery.step == self._next and delivery.step < self._next_entry_step:  # the step has no entries
                self._next, self._recorded = delivery.step + 1, delivery
            elif delivery.writer:
                self._write(delivery)

    def _write(self, delivery: Delivery) -> None:
        """Write the entries of the delivered step to all files. If this raises, the files are unchanged."""
        pipeline, step = delivery.pipeline, delivery.step
        with contextlib.ExitStack() as locks:
            opened = [(path, locks.enter_context(_locked(path))) for path in self.paths]
            sizes = [os.fstat(fd).st_size for _, fd in opened]
            events, since, entries = self._entries(pipeline, step, sizes)
            entry_step = next((event.step for event in events.following(step + 1)), pipeline.end_step)
            for (path, fd), end, size in zip(opened, self._ends, sizes, strict=True):
                if 0 < end < size:  # this log has written to the file, and the file has grown since then
                    _warn_of_other_writer(path, fd, end)
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            try:
                ends = [_append(path, fd, time, entries) for path, fd in opened]
                state = ends, events, since, step + 1, entry_step, delivery
                self._ends, self._events, self._since, self._next, self._next_entry_step, self._recorded = state
            except BaseException:
                if self._recorded is not delivery:  # else Ctrl-C came after the assignment: the entries are written
                    for (_, fd), size in zip(opened, sizes, strict=True):
                        with contextlib.suppress(OSError):
                            os.ftruncate(fd, size)
                raise

    def _entries(self, pipeline: Run, step: int, sizes: list[int]) -> tuple[Events, int, list[Fields]]:
        """Return new values of `_events` and `_since`, and the entries of `step`. `sizes` are the files' present sizes."""
        # True for the first entry of this process, and if a file was moved away or another writer added entries to it
        loads = self._events is None or sizes != self._ends
        # a run that begins at step 0 with empty files does not resume
        run_is_new = self._events is None and not any(sizes) and step == 0
        events = self._events or Events(pipeline)
        jumps = loads or step != self._next
        since = step if jumps else self._since
        entries = [events.load(pipeline.sampler.host.count)] if loads else []
        if jumps and not run_is_new:
            entries.append(events.resume(step))
        due = itertools.takewhile(lambda event: event.step == step, events.following(step))
        return events, since, [*entries, *(events.entry(event, since) for event in due)]

    def __reduce__(self) -> tuple[type[Self], tuple[str]]:
        return type(self), (self.path,)  # the copy in a worker process gets no `batch_handed_out`, so it needs no state


@contextlib.contextmanager
def _locked(path: str) -> Iterator[int]:
    """Yield the descriptor of a file under a lock that excludes other writers."""
    with contextlib.ExitStack() as cleanup:
        with _storage_errors(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            cleanup.callback(os.close, fd)
        with contextlib.suppress(OSError):  # some file systems have no locks; a single writer needs no lock
            cleanup.callback(HeldLock(os.dup(fd)).release)
        yield fd


def _warn_of_other_writer(path: str, fd: int, end: int) -> None:
    """Log a warning with the first line that another writer has added, at byte `end` of the file."""
    with _storage_errors(path):
        first = os.pread(fd, 200, end).split(b"\n")[0].decode(errors="replace")
    found = f"another process or pipeline has added entries to this run's audit log, beginning with {first!r}"
    logging.warning("%s: %s. Give each run an audit log of its own.", path, found)


def _append(path: str, fd: int, time: str, entries: Sequence[Fields]) -> int:
    """Append entries to a file, sync it, and return its new size."""
    with _storage_errors(path):
        size = os.fstat(fd).st_size
        before = os.pread(fd, size, 0)  # the whole file, to count its lines
        data = CUT + b"\n" if size and not before.endswith(b"\n") else b""
        line = FORMATS["." + path.rpartition(".")[2]]
        for number, fields in enumerate(entries, (before + data).count(b"\n") + 1):
            data += line(time, {**fields, "entry": number}).encode() + b"\n"
        written = os.write(fd, data)
        if written < len(data):
            raise OSError(f"{written} of {len(data)} bytes written; is the disk full?")
        os.fsync(fd)
        if not size:  # the file may be new, so its name must reach the disk too
            files.sync_folder(Path(path).parent)
        return size + len(data)


@contextlib.contextmanager
def _storage_errors(path: str) -> Iterator[None]:
    """Raise an OSError of the context as a StorageError about the audit log at `path`."""
    try:
        yield
    except OSError as error:
        reason = f"the audit log can't be written ({error.strerror or error})"
        raise StorageError(f"{path}: {reason}. Make room, or give another path.") from error
