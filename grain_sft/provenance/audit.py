"""AuditLog: which data a run was given, written down while it runs.

Four kinds of entries: `dataset_load` once per process, when its first batch is handed out (and again in a log that is
begun anew because the old one was moved away); `resume` where batches go on elsewhere than after the last one;
`epoch_start` and `epoch_complete` with the first and the last batch of an epoch. Their fields are in `audit_events`, their
form is in `audit_line`. `grain-sft audit-check` computes all of it again.

Of all processes host 0 alone writes, and of its threads and workers only what hands a batch to the trainer, so that an
entry says what the trainer was given, not what was read ahead. Between the borders of epochs nothing is written.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grain_sft.errors import PipelineError, StorageError
from grain_sft.provenance.audit_events import Events
from grain_sft.provenance.audit_line import FIRST_CHAIN, Fields, json_line, lines_of, seal_of, sealed, text_line
from grain_sft.storage import files
from grain_sft.storage.temporary import HeldLock

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

_WINDOW = 1 << 16  # bytes at the end of a log that are read first


class AuditLog:
    """The audit log of a pipeline's batches.

    Args:
      path: without the endings `.log` and `.jsonl`: both are written; with one of them, that one. A local path. Entries
        are added to what is there.

    Raises:
      PipelineError: a remote path.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = files.absolute(files.normalize(path))
        if files.is_remote(self.path):
            raise PipelineError(
                f"audit={self.path!r}: expected a local path, for lines can't be added to a file in a bucket. Copy the log "
                "there when the run has ended."
            )
        named = [ending for ending in _FORMATS if self.path.endswith(ending)]
        self._files = [_LogFile(Path(self.path), _FORMATS[named[0]])] if named else []
        if not named:
            self._files = [_LogFile(Path(self.path + ending), line) for ending, line in _FORMATS.items()]
        self._lock = threading.RLock()
        self._next = -1  # step whose batch is handed out next, if all goes on as it went
        self._quiet_until = -1  # from `_next` up to this step, nothing is written
        self._pending = -1  # step whose entries are made, and not all written
        self._waiting: list[list[bytes]] = [[] for _ in self._files]  # these entries, of each file
        self._delivered: object = None  # last delivery that was recorded
        self._since = 0
        self._events: Events | None = None

    @property
    def paths(self) -> list[str]:
        """Of the files that are written."""
        return [str(file.path) for file in self._files]

    def handed_out(self, pipeline: Pipeline, step: int, delivery: object = None) -> None:
        """Write what there is to say of the batch of `step`, which the trainer gets now.

        An exception may arrive at any moment in here, as Ctrl-C does: what changes is changed by one assignment.

        Args:
          pipeline: the same each time.
          delivery: object that stands for this delivery: a second call with it records nothing. None: each call is one.

        Raises:
          StorageError: it can't be written. Called again with the same step, what is missing is written.
        """
        with self._lock:
            if delivery is not None and delivery is self._delivered:
                return
            if step == self._next and step < self._quiet_until:
                self._next, self._delivered = step + 1, delivery
            elif not pipeline.sampler.host.index:
                self._write(pipeline, step, delivery)

    def _write(self, pipeline: Pipeline, step: int, delivery: object) -> None:
        if step != self._pending:
            entries, events, since = self._entries(pipeline, step)
            time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            waiting = [
                [*before, *file.lines(time, entries)] for file, before in zip(self._files, self._waiting, strict=True)
            ]
            self._waiting, self._events, self._since, self._pending = waiting, events, since, step
        for file, lines in zip(self._files, self._waiting, strict=True):
            file.write(lines)
        assert self._events is not None
        following = next(self._events.following(step + 1), None)
        quiet_until = pipeline.end_step if following is None else following.step
        self._pending, self._next, self._quiet_until, self._delivered = -1, step + 1, quiet_until, delivery

    def _entries(self, pipeline: Pipeline, step: int) -> tuple[list[Fields], Events, int]:
        found: list[Fields] = []
        events, since = self._events, self._since
        there = [file.has_entries() for file in self._files]
        begins = events is None or not all(there)  # also where a file was moved away while the run goes on
        again = events is not None or any(there)
        events = events or Events(pipeline)
        if begins:
            found.append(events.load(pipeline.sampler.host.count))
        if begins or step != self._next:
            since = step
            if again or step:
                found.append(events.resume(step))
        for event in itertools.takewhile(lambda event: event.step == step, events.following(step)):
            found.append(events.entry(event, since))
        return found, events, since

    def __reduce__(self) -> tuple[type[AuditLog], tuple[str]]:
        return type(self), (self.path,)  # a worker's copy: it hands out nothing, and so writes nothing


class _LogFile:
    """One file of a log."""

    def __init__(self, path: Path, line: Callable[[str, Fields], bytes]) -> None:
        self.path = path
        self._line = line

    def has_entries(self) -> bool:
        """Whether something was written before."""
        try:
            return self.path.stat().st_size > 0
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._unwritable(error) from error

    def lines(self, time: str, entries: Sequence[Fields]) -> list[bytes]:
        """Entries as this file has them, without their seals."""
        return [self._line(time, fields) for fields in entries]

    def write(self, waiting: list[bytes]) -> None:
        """Append lines, whole and all at once, synced to disk, and take them out of `waiting`; or neither, where something is
        raised."""
        if not waiting:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            lock = None
            try:
                with contextlib.suppress(OSError):  # a file system without locks: then one process at a time must do
                    lock = HeldLock(os.dup(fd))
                self._append(fd, waiting)
            finally:
                os.close(fd)
                if lock is not None:
                    lock.release()
        except OSError as error:
            raise self._unwritable(error) from error

    def _append(self, fd: int, waiting: list[bytes]) -> None:
        size = os.fstat(fd).st_size
        before, entry, chain = _end_of(fd, size)
        data = b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""  # the end of a line half written
        for body in waiting:
            entry += 1
            line, chain = sealed(body, entry, before, chain)
            data, before = data + line + b"\n", b""
        try:
            written = os.write(fd, data)
            if written < len(data):
                raise OSError(f"{written} of {len(data)} bytes written; is the disk full?")
            os.fsync(fd)
            if not size:
                files.sync_folder(self.path.parent)
            waiting.clear()
        except BaseException:  # also Ctrl-C
            if waiting:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, size)
            raise

    def _unwritable(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path}: the audit log can't be written ({error.strerror or error}). Make room, or give another path."
        )


_FORMATS: dict[str, Callable[[str, Fields], bytes]] = {".log": text_line, ".jsonl": json_line}


def _end_of(fd: int, size: int) -> tuple[bytes, int, str]:
    """What follows the last sealed line of a file, as whole lines, and that line's number and chain."""
    window = _WINDOW
    while True:
        start = max(0, size - window)
        data = os.pread(fd, size - start, start)
        lines = lines_of(data)
        after = b""
        for line in reversed(lines[1:] if start else lines):  # the first may begin before the window
            seal = seal_of(line)
            if seal is not None:
                return after, seal.entry, seal.chain
            after = line + b"\n" + after
        if not start:
            return after, 0, FIRST_CHAIN
        window *= 4
