"""Watchdog: says in the log where a run stalls while it stalls, and from time to time how it goes.

One thread looks at all iterators of the process, about once a second; `next` itself only writes down when it began. The
thread is there from the first `next` of an iterator until the last iterator is closed or collected.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import math
import os
import queue
import sys
import threading
import weakref
from threading import get_ident
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from absl import logging

from grain_sft.errors import PipelineError
from grain_sft.observers import in_flight as making
from grain_sft.observers import metrics
from grain_sft.observers import stacks as places
from grain_sft.observers.tally import Tally, Totals
from grain_sft.source import workers
from grain_sft.storage.forks import renew_lock

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

STALL_VARIABLE = "GRAIN_SFT_STALL_SECONDS"
SUMMARY_VARIABLE = "GRAIN_SFT_LOG_EVERY"

_LOOKS = 8  # within the time that is called a stall
_LONGEST_PAUSE = 1.0  # seconds


class Settings(NamedTuple):
    """After how many seconds of waiting a stall is logged, again after twice as many, and so on, and how many seconds
    lie between two summaries; 0: never."""

    stall: float = 30.0
    summary: float = 0.0

    @classmethod
    def from_environment(cls) -> Settings:
        """Of $GRAIN_SFT_STALL_SECONDS and $GRAIN_SFT_LOG_EVERY.

        Raises:
          PipelineError: no such number.
        """
        return cls(_seconds(STALL_VARIABLE, cls().stall), _seconds(SUMMARY_VARIABLE, cls().summary))


class Watched(Protocol):
    """Something whose `next` is watched."""

    def whereabouts(self) -> list[str]:
        """What makes the batch that is waited for, a line each."""


class _Summary(NamedTuple):
    """When one was logged, at which step, and what was counted by then."""

    at: float
    step: int
    totals: Totals


class Watch:
    """How long an iterator's batches are waited for.

    Attributes:
      open: whether the iterator still gives batches.
      watched: whether the watchdog knows of this, or need not.
    """

    def __init__(self, owner: Watched, pipeline: Pipeline | None) -> None:
        self.settings = Settings.from_environment()
        self.watched = not (self.settings.stall or self.settings.summary)
        self.open = True
        self._owner, self._pipeline = weakref.ref(owner), pipeline
        self._thread = 0
        self._since = 0.0  # 0: nobody waits
        self._step = 0
        self._tally = Tally(here=pipeline is not None)
        self._most = 0 if metrics.AT_ONCE else metrics.WRITTEN_DOWN * metrics.HANDED_OUT
        self._next_warning = self.settings.stall
        self._warned = False
        self._last_summary: _Summary | None = None
        if pipeline is not None:
            making.add(self)

    def begin(self, step: int) -> None:
        """The batch of `step` is waited for from now on."""
        self._thread, self._step, self._since = get_ident(), step, perf_counter()
        if not self.watched:
            _watchdog.add(self)

    def came(self, batch: Any) -> None:
        """It came."""
        now, since = perf_counter(), self._since
        self._since = 0.0
        if self._warned:
            self._ended("came", now - since)
        try:
            shape = next(iter(batch.values())).shape
            rows, tokens = shape[0], math.prod(shape)
        except (AttributeError, IndexError, TypeError, StopIteration):
            # what a transform made of it is no dict of arrays
            rows = tokens = 0
        metrics.handed_out.extend((since, now, self._step, rows, tokens, self._tally))
        if len(metrics.handed_out) > self._most:
            metrics.count()

    def failed(self) -> None:
        """It failed."""
        seconds, self._since = perf_counter() - self._since, 0.0
        if self._warned:
            self._ended("failed", seconds)

    def _ended(self, how: str, seconds: float) -> None:
        self._next_warning, self._warned = self.settings.stall, False
        logging.warning("Step %d %s after %.1f s.", self._step, how, seconds)

    def making(self) -> making.Making | None:
        """The batch that is made here and now, by the thread that waits for it."""
        thread, step, since = self._thread, self._step, self._since
        return making.Making(thread, step, since, self._pipeline) if since and self._pipeline is not None else None

    def pause(self) -> float:
        """Seconds until this is to be looked at again."""
        shortest = min(seconds for seconds in self.settings if seconds)
        return min(_LONGEST_PAUSE, shortest / _LOOKS)

    def look(self) -> None:
        """Log what there is to be said now."""
        now, since = perf_counter(), self._since
        if since and self.settings.stall and now - since >= self._next_warning:
            self._warn(now - since)
        if self.settings.summary:
            last = self._last_summary
            if last is None or now - last.at >= self.settings.summary:
                self._last_summary = _Summary(now, self._step, self._totals())
                if last is not None:
                    self._summarise(last, self._last_summary)

    def forked(self) -> None:
        """This is a new process, in which nobody waits."""
        self._since, self.watched = 0.0, not any(self.settings)

    def _totals(self) -> Totals:
        """Of all batches that came."""
        metrics.count()
        return self._tally.totals

    def _warn(self, seconds: float) -> None:
        owner = self._owner()
        step = self._step
        lines = ["nothing makes it"] if owner is None else owner.whereabouts() or ["no thread is making a batch"]
        if not self._since or self._step != step:
            return  # it came meanwhile
        self._next_warning, self._warned = _doubled(self._next_warning, seconds), True
        mean = metrics.mean_seconds_to_make()
        if mean is not None:
            lines.append(f"before, a batch took {_short(mean)} to make on average")
        counted = self._totals()
        if counted.steps:
            lines.append(f"before, the training loop took {_short(counted.elsewhere / counted.steps)} a step")
        logging.warning("Step %d: no batch after %.1f s.\n%s", step, seconds, _indented(lines))

    def _summarise(self, last: _Summary, now: _Summary) -> None:
        begun, ended = last.totals, now.totals
        steps, seconds = ended.steps - begun.steps, now.at - last.at
        if not steps:
            _log("No step in %.0f s; the last one asked for is %d.", seconds, now.step)
            return
        longest, self._tally.longest = self._tally.longest, 0.0
        _log(
            "Steps %d to %d: %.0f tokens/s, %.2f steps/s; waited %s a step, %s at most; the training loop took %s a step.",
            now.step - steps + (0 if self._since else 1),
            now.step - (1 if self._since else 0),
            (ended.tokens - begun.tokens) / seconds,
            steps / seconds,
            _short((ended.waited - begun.waited) / steps),
            _short(longest),
            _short((ended.elsewhere - begun.elsewhere) / steps),
        )


class WorkerWatch:
    """What the threads of a worker process make, and since when: their stacks are seen from within only. Attributes as
    those of `Watch`."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.watched, self.open = settings, False, True
        self._next_warning: dict[making.Making, float] = {}

    def pause(self) -> float:
        """Seconds until this is to be looked at again."""
        return min(_LONGEST_PAUSE, self.settings.stall / _LOOKS)

    def look(self) -> None:
        """Log what there is to be said now."""
        now, current = perf_counter(), making.now()
        self._next_warning = {each: self._next_warning.get(each, self.settings.stall) for each in current}
        late = [each for each in current if now - each.since >= self._next_warning[each]]
        if not late:
            return
        for each in late:
            self._next_warning[each] = _doubled(self._next_warning[each], now - each.since)
        lines, seconds = places.of_makers(None), now - late[0].since
        logging.warning("Worker process %d: no batch after %.1f s.\n%s", os.getpid(), seconds, _indented(lines))

    def forked(self) -> None:
        """This is a new process."""


class _Watchdog:
    """The thread."""

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Watch | WorkerWatch] = weakref.WeakSet()
        self._lock = threading.Lock()
        renew_lock(self)
        # neither Event nor Thread.start: they hang when an exception, as Ctrl-C, arrives inside them
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._over = False

    def add(self, watch: Watch | WorkerWatch) -> None:
        """Look at this one too."""
        with self._lock:
            if self._over or sys.is_finalizing():  # a thread that starts now would hang
                watch.watched = True
                return
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grain_sft-watchdog", daemon=True)
                try:
                    _thread.start_new_thread(self._thread.start, ())
                except RuntimeError:  # the interpreter ends, or the process may have no more threads
                    self._thread = None
            self._wake.put(None)
            watch.watched = True

    def end(self) -> None:
        """The interpreter is about to end."""
        self._over = True
        self._wake.put(None)
        thread = self._thread
        if thread is not None and thread.ident is not None:
            thread.join(1.0)

    def forked(self) -> None:
        """This is a new process: the thread was not taken along."""
        for watch in list(self._watches):
            watch.forked()
        self._watches = weakref.WeakSet()
        self._thread, self._wake = None, queue.SimpleQueue()

    def _run(self) -> None:
        while True:
            with self._lock:
                watches = [watch for watch in self._watches if watch.open]
                if self._over or not watches:
                    self._thread = None
                    return
            for watch in watches:
                try:
                    watch.look()
                except Exception as error:  # a run doesn't end because of what watches it
                    logging.warning("The watchdog of stalls failed: %r", error)
                    self._over = True
            pause = min(watch.pause() for watch in watches)
            del watches, watch
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=pause)


_watchdog = _Watchdog()
_worker: list[WorkerWatch] = []  # of this process: one at most

atexit.register(_watchdog.end)
os.register_at_fork(after_in_child=_watchdog.forked)


def watch_worker() -> None:
    """In a worker process of Grain's, have stalls logged; elsewhere, their iterator's watch does it."""
    settings = Settings.from_environment()
    if settings.stall and not _worker and workers.in_worker():
        _worker.append(WorkerWatch(settings))
        _watchdog.add(_worker[0])


def _log(text: str, *values: Any) -> None:
    """Log what was asked for by $GRAIN_SFT_LOG_EVERY: absl hides INFO unless its verbosity is raised."""
    (logging.info if logging.level_info() else logging.warning)(text, *values)


def _doubled(warning: float, seconds: float) -> float:
    """The next time, doubled from the last one, that is not over yet."""
    while warning <= seconds:
        warning *= 2
    return warning


def _short(seconds: float) -> str:
    """A time with two digits: "58 µs", "1.2 ms", "3 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"


def _indented(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _seconds(variable: str, default: float) -> float:
    text = os.environ.get(variable)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise PipelineError(f"${variable} is {text!r}: expected seconds, such as {default or 300:g}, or 0 for never.")
    return number
