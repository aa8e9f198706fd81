"""Watchdog: logs of what a run waits for during a stall, and summaries at an interval.

One thread checks all open iterators of the process, about once a second. It exists while an iterator is open."""

from __future__ import annotations

import _thread
import abc
import atexit
import contextlib
import copy
import functools
import math
import os
import queue
import sys
import threading
import weakref
from time import perf_counter
from typing import Any

from absl import logging

from grain_sft.errors import PipelineError
from grain_sft.pipeline import Observer, Pipeline, StepIterator
from grain_sft.source import workers
from grain_sft.storage import activity

STALL_VARIABLE = "GRAIN_SFT_STALL_SECONDS"
SUMMARY_VARIABLE = "GRAIN_SFT_LOG_EVERY"
_DEFAULTS = {STALL_VARIABLE: 30.0, SUMMARY_VARIABLE: 0.0}

_CHECKS = 8  # before a wait becomes a stall
_LONGEST_PAUSE = 1.0  # seconds
_STATES = {
    "R": "running", "S": "waiting", "D": "waiting for a disk or network file system", "T": "stopped by a signal",
    "t": "stopped by a debugger", "Z": "dead",
}  # fmt: skip


Wait = tuple[int, float]
"""A step that a caller waits for, and the time of `time.perf_counter` at which the wait began."""


def _seconds(variable: str) -> float:
    """Return the seconds that an environment variable holds: to the log of a stall, or between summaries. 0 means never."""
    text = os.environ.get(variable) or str(_DEFAULTS[variable])
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise PipelineError(f"${variable} is {text!r}: expected seconds, such as 300, or 0 for never.")
    return number


class _Watch(abc.ABC):
    """Base class of watches, which log stalls while they last."""

    def __init__(self, stall: float, summary: float) -> None:
        self.stall, self.summary = stall, summary
        self._next_warning: dict[Wait, float] = {}

    def stalls(self, waits: list[Wait], now: float) -> list[Wait]:
        """Return the waits to log now. A wait is logged after `stall` seconds, and again whenever its time has doubled."""
        if not self.stall:
            return []
        self._next_warning = {wait: self._next_warning.get(wait, self.stall) for wait in waits}
        late = [wait for wait in waits if now - wait[1] >= self._next_warning[wait]]
        for wait in late:
            while self._next_warning[wait] <= now - wait[1]:
                self._next_warning[wait] *= 2
        return late

    @abc.abstractmethod
    def check(self, now: float) -> bool:
        """Log the stalls and summaries that are due at `now`. Return False if the watched object no longer exists."""


class _IteratorWatch(_Watch):
    """Watch of an iterator, which also logs summaries."""

    def __init__(self, stall: float, summary: float, iterator: StepIterator[Any], dog: Watchdog) -> None:
        super().__init__(stall, summary)
        self._iterator, self._stats, self._dog = weakref.ref(iterator), iterator.stats, dog
        self._summarised, self._last = perf_counter(), copy.copy(iterator.stats)

    def check(self, now: float) -> bool:
        iterator, stats = self._iterator(), self._stats
        if iterator is None:
            return False
        waiting = stats.waiting
        for wait in self.stalls([] if waiting is None else [waiting], now):
            lines = self._describe(iterator)
            if stats.waiting == wait:  # else the batch came meanwhile
                self._dog.stalled.add((id(iterator.pipeline), wait[0]))
                logging.warning("Step %d: no batch after %.1f s.\n  %s", wait[0], now - wait[1], "\n  ".join(lines))
        if self.summary and now - self._summarised >= self.summary:
            self._summarise(now)
        return True

    def _describe(self, iterator: StepIterator[Any]) -> list[str]:
        """Return lines that name what the iterator waits for, and how long earlier steps took."""
        pids = iterator.worker_pids()
        if pids is None:
            lines = activity.describe_makers(iterator.pipeline) or ["no thread is making a batch"]
        else:
            states = ", ".join(f"{pid} is {_state(pid)}" for pid in sorted(pids))
            lines = [f"worker process {pids[0]} makes it; {states}" if pids else "no worker process is alive"]
        if recent := list(activity.recent):
            lines.append(f"before, a batch took {_short(sum(recent) / len(recent))} to make on average")
        if self._stats.steps:
            lines.append(f"before, the training loop took {_short(self._stats.elsewhere / self._stats.steps)} a step")
        return lines

    def _summarise(self, now: float) -> None:
        """Log what happened since the last summary."""
        last, stats, seconds = self._last, copy.copy(self._stats), now - self._summarised
        self._summarised, self._last, steps = now, stats, stats.steps - last.steps
        # absl hides INFO unless its verbosity is raised
        log = logging.info if logging.level_info() else logging.warning
        if not steps:
            log("No step in %.0f s; the next one is %d.", seconds, stats.next_step)
            return
        self._stats.longest = 0.0
        waited, elsewhere = (stats.waited - last.waited) / steps, (stats.elsewhere - last.elsewhere) / steps
        log(
            "Steps %d to %d: %.0f tokens/s, %.2f steps/s; waited %s a step, %s at most; the training loop took %s a step.",
            *(stats.next_step - steps, stats.next_step - 1, (stats.tokens - last.tokens) / seconds, steps / seconds),
            *map(_short, (waited, stats.longest, elsewhere)),
        )


class _WorkerWatch(_Watch):
    """Watch of the batches that the threads of this worker process make."""

    def check(self, now: float) -> bool:
        if late := self.stalls([(step, since) for step, since, _ in activity.making.copy().values()], now):
            seconds, lines = now - min(since for _, since in late), "\n  ".join(activity.describe_makers())
            logging.warning("Worker process %d: no batch after %.1f s.\n  %s", os.getpid(), seconds, lines)
        return True


class Watchdog(Observer):
    """Observer that logs stalls and summaries of all iterators of this process.

    Attributes:
      stalled: Pairs of a pipeline's id and a step whose stall was logged and has not ended.
    """

    def __init__(self) -> None:
        self.stalled: set[tuple[int, int]] = set()
        self._over = False
        self._begin()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        """Set the state of a process that has no thread of the watchdog yet; a forked child keeps none of the parent's."""
        self._watches: dict[object, _Watch] = {}
        self._lock = threading.Lock()
        # neither Event nor Thread.start: both hang if an exception such as KeyboardInterrupt arrives inside them
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def iterator_opened(self, iterator: StepIterator[Any]) -> None:
        stall, summary = map(_seconds, _DEFAULTS)
        if stall or summary:
            self._add(iterator.stats, _IteratorWatch(stall, summary, iterator, self))

    def worker_started(self, pipeline: Pipeline) -> None:
        stall = _seconds(STALL_VARIABLE)
        if stall and _WorkerWatch not in self._watches and workers.in_worker():
            self._add(_WorkerWatch, _WorkerWatch(stall, 0.0))

    def batch_awaited(self, iterator: StepIterator[Any], step: int, seconds: float) -> None:
        if self.stalled:
            self._ended(iterator.pipeline, step, "came", seconds)

    def batch_failed(self, iterator: StepIterator[Any], step: int, seconds: float, error: BaseException) -> None:
        if self.stalled:
            self._ended(iterator.pipeline, step, "failed", seconds)

    def _ended(self, pipeline: Pipeline, step: int, outcome: str, seconds: float) -> None:
        if (id(pipeline), step) in self.stalled:
            self.stalled.discard((id(pipeline), step))
            logging.warning("Step %d %s after %.1f s.", step, outcome, seconds)

    def iterator_closed(self, iterator: StepIterator[Any]) -> None:
        with self._lock:
            self._watches.pop(iterator.stats, None)

    def _add(self, key: object, watch: _Watch) -> None:
        with self._lock:
            if self._over or sys.is_finalizing():  # a thread that starts now would hang
                return
            self._watches[key] = watch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grain_sft-watchdog", daemon=True)
                try:
                    _thread.start_new_thread(self._thread.start, ())
                except RuntimeError:  # the interpreter ends, or the process may have no more threads
                    self._thread = None
            self._wake.put(None)

    def _end(self) -> None:
        """End the thread before the interpreter ends."""
        self._over = True
        self._wake.put(None)
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._over or not self._watches:
                    self._thread = None
                    return
                watches = dict(self._watches)
            try:
                gone = [key for key, watch in watches.items() if not watch.check(perf_counter())]
            except Exception as error:  # an error of the watchdog must not end the run
                logging.warning("The watchdog of stalls failed: %r", error)
                self._over, gone = True, []
            with self._lock:
                for key in gone:
                    self._watches.pop(key, None)
            shortest = min(seconds for each in watches.values() for seconds in (each.stall, each.summary) if seconds)
            del watches, gone
            if self._watches:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=min(_LONGEST_PAUSE, shortest / _CHECKS))


@functools.cache
def of_process() -> Watchdog:
    """Return the object that observes all runs of this process."""
    return Watchdog()


def _state(pid: int) -> str:
    """Return the state of a process, from /proc."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "gone"
    return _STATES.get(letter, letter)


def _short(seconds: float) -> str:
    """Return a time with two or three digits and its unit: "58 µs", "1.2 ms", "3.4 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"
