"""Watchdog: an observer that logs what a run waits for when a batch takes long, and at intervals a summary of the run.

One thread checks all open iterators of the process, about once a second.
"""

import _thread
import atexit
import contextlib
import copy
import functools
import math
import os
import queue
import re
import sys
import threading
import weakref
from pathlib import Path
from time import perf_counter

from absl import logging

from grain_sft.errors import PipelineError
from grain_sft.pipeline import ObservedIterator, Observer, Run
from grain_sft.source import workers
from grain_sft.storage import activity

STALL_VARIABLE = "GRAIN_SFT_STALL_SECONDS"
SUMMARY_VARIABLE = "GRAIN_SFT_LOG_EVERY"
_DEFAULTS = {STALL_VARIABLE: 30.0, SUMMARY_VARIABLE: 0.0}

_CHECKS = 8  # minimum number of checks before a wait counts as a stall, and between two summaries
_LONGEST_PAUSE = 1.0  # maximum number of seconds between two checks

Wait = tuple[int, float]
"""A step that `next` waits for or that a thread makes, and the time of `time.perf_counter` at which this began."""


def _seconds(variable: str) -> float:
    """Return the seconds in an environment variable, or its default."""
    text = os.environ.get(variable) or str(_DEFAULTS[variable])
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise PipelineError(f"${variable} is {text!r}: expected seconds, such as 300, or 0 for never.")
    return number


class _Watch:
    """Base of the watches, which check what one iterator or this worker process waits for.

    Args:
      stall: Seconds after which a wait is logged; 0 for never.
      summary: Seconds between two summaries in the log; 0 for no summaries.
    """

    def __init__(self, stall: float, summary: float) -> None:
        self.stall, self.summary = stall or math.inf, summary or math.inf
        self._next_warning: dict[Wait, float] = {}  # for each wait, seconds from its start to the next warning

    def stalls(self, waits: list[Wait], now: float) -> list[Wait]:
        """Return the waits to log now. A wait is logged after `stall` seconds, and again each time its length has doubled."""
        self._next_warning = {wait: self._next_warning.get(wait, self.stall) for wait in waits}
        late = [wait for wait in waits if now - wait[1] >= self._next_warning[wait]]
        for wait in late:
            while self._next_warning[wait] <= now - wait[1]:
                self._next_warning[wait] *= 2
        return late


class _IteratorWatch(_Watch):
    """Watch of the batches that one iterator hands out."""

    def __init__(self, stall: float, summary: float, iterator: ObservedIterator) -> None:
        super().__init__(stall, summary)
        self._iterator = weakref.ref(iterator)
        self._stats = iterator.stats  # the same object each time; reading the property brings it up to date
        self._last_summary = perf_counter()
        self._last_stats = copy.copy(iterator.stats)

    def check(self, now: float) -> bool:
        """Log the stalls and summaries that are due at `now`. Return False if the iterator no longer exists."""
        iterator = self._iterator()
        if iterator is None:
            return False
        waiting = self._stats.waiting
        for wait in self.stalls([] if waiting is None else [waiting], now):
            step, since = wait
            lines = self._describe(iterator)
            if self._stats.waiting == wait:  # False if the batch arrived in the meantime
                self._stats.stalled = wait  # then `stall_ended` is called after the wait
                logging.warning("Step %d: no batch after %.1f s.\n  %s", step, now - since, "\n  ".join(lines))
        if now - self._last_summary >= self.summary:
            self._log_summary(iterator, now)
        return True

    def _describe(self, iterator: ObservedIterator) -> list[str]:
        """Return lines about the threads or worker processes that make batches, and about the times of earlier batches."""
        pids = iterator.worker_pids()  # the first is the worker of the next batch
        if pids is None:
            lines = activity.describe_makers(iterator.pipeline) or ["no thread is making a batch"]
        else:
            states = ", ".join(f"{pid} is {_state(pid)}" for pid in sorted(pids))
            lines = [f"worker process {pids[0]} makes it; {states}" if pids else "no worker process is alive"]
        stats = iterator.stats  # this adds the times of new batches to `activity.recent`, which the next line reads
        if recent := list(activity.recent):
            lines.append(f"earlier batches took {_short(sum(recent) / len(recent))} to make, on average")
        if stats.steps > 1:  # the training loop ran `steps` - 1 times, between the steps
            lines.append(f"earlier, the training loop took {_short(stats.elsewhere / (stats.steps - 1))} a step")
        return lines

    def _log_summary(self, iterator: ObservedIterator, now: float) -> None:
        before, stats = self._last_stats, copy.copy(iterator.stats)
        seconds = now - self._last_summary
        self._last_summary, self._last_stats = now, stats
        steps = stats.steps - before.steps
        # absl hides INFO by default; then the summary is logged as a warning
        log = logging.info if logging.level_info() else logging.warning
        if not steps:
            log("No step in %.0f s; the next one is %d.", seconds, iterator.next_step)
            return
        self._stats.longest = 0.0  # the next summary has a maximum of its own; `stats` is a copy
        tokens = stats.tokens - before.tokens
        waited = _short((stats.waited - before.waited) / steps)
        # the training loop runs between steps: 4 times in the first 5 steps of a run
        training = _short((stats.elsewhere - before.elsewhere) / (steps if before.steps else max(1, steps - 1)))
        rates = f"{tokens / seconds:.0f} tokens/s, {steps / seconds:.2f} steps/s"
        waits = f"waited {waited} a step, {_short(stats.longest)} at most; the training loop took {training} a step"
        log("Steps %d to %d: %s; %s.", stats.next_step - steps, stats.next_step - 1, rates, waits)


class _WorkerWatch(_Watch):
    """Watch of the batches that the threads of this worker process make."""

    def check(self, now: float) -> bool:
        """Log the stalls that are due at `now`. Return True: this watch lasts as long as the process."""
        late = self.stalls([(step, since) for step, since, _ in activity.making.copy().values()], now)
        if late:
            longest = now - min(since for _, since in late)
            lines = "\n  ".join(activity.describe_makers())
            logging.warning("Worker process %d: no batch after %.1f s.\n  %s", os.getpid(), longest, lines)
        return True


class Watchdog(Observer):
    """Observer that logs stalls and summaries of all iterators of this process."""

    def __init__(self) -> None:
        self._has_ended = False
        self._reset()
        atexit.register(self._end)
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        """Begin without watches and without a thread. A forked child does not have the thread of its parent."""
        self._watches: dict[object, _IteratorWatch | _WorkerWatch] = {}
        self._lock = threading.Lock()
        # An item ends the thread's pause between two checks. An `Event` would hang if an exception such as KeyboardInterrupt
        # arrived inside its methods.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def iterator_opened(self, iterator: ObservedIterator) -> None:
        stall, summary = _seconds(STALL_VARIABLE), _seconds(SUMMARY_VARIABLE)
        if stall or summary:
            self._add(id(iterator), _IteratorWatch(stall, summary, iterator))

    def worker_started(self, pipeline: Run) -> None:
        stall = _seconds(STALL_VARIABLE)
        # check `in_worker`, because a dataset may be unpickled in other processes, too
        if stall and _WorkerWatch not in self._watches and workers.in_worker():
            self._add(_WorkerWatch, _WorkerWatch(stall, 0.0))  # one such watch; its key is the class

    def stall_ended(self, step: int, seconds: float, error: BaseException | None) -> None:
        logging.warning("Step %d %s after %.1f s.", step, "came" if error is None else "failed", seconds)

    def iterator_closed(self, iterator: ObservedIterator) -> None:
        with self._lock:
            self._watches.pop(id(iterator), None)

    def _add(self, key: object, watch: _IteratorWatch | _WorkerWatch) -> None:
        """Add a watch, and start the thread if it does not run."""
        with self._lock:
            if self._has_ended or sys.is_finalizing():  # a thread that starts now would hang
                return
            self._watches[key] = watch
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="grain_sft-watchdog", daemon=True)
                try:
                    # called in another thread, because `start` can hang if Ctrl-C arrives
                    _thread.start_new_thread(self._thread.start, ())
                except RuntimeError:  # the interpreter is ending, or the process can't start more threads
                    self._thread = None
            self._wake.put(None)

    def _end(self) -> None:
        self._has_ended = True
        self._wake.put(None)
        if self._thread is not None and self._thread.ident is not None:  # `ident` is None before the thread runs
            self._thread.join(1.0)

    def _run(self) -> None:
        """Check all watches at intervals, in the thread, until no watch is left or the process ends."""
        while True:
            with self._lock:
                if self._has_ended or not self._watches:
                    self._thread = None
                    return
                watches = dict(self._watches)
            try:
                gone = [watch for watch in watches.values() if not watch.check(perf_counter())]
            except Exception as error:  # an error of the watchdog must not end the run
                logging.warning("The watchdog of stalls failed: %r", error)
                self._has_ended, gone = True, []
            with self._lock:  # compare watches, because a new iterator may have got the `id` of one that is gone
                self._watches = {key: watch for key, watch in self._watches.items() if watch not in gone}
            shortest = min(interval for watch in watches.values() for interval in (watch.stall, watch.summary))
            if self._watches:
                with contextlib.suppress(queue.Empty):
                    self._wake.get(timeout=min(_LONGEST_PAUSE, shortest / _CHECKS))


of_process = functools.cache(Watchdog)
"""Function that returns the watchdog of all runs of this process."""


def _state(pid: int) -> str:
    """Return the state of a process, such as "sleeping" from the kernel's line `State:  S (sleeping)`."""
    with contextlib.suppress(OSError):
        if state := re.search(r"^State:.*\((.+)\)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE):
            return state[1]
    return "gone"


def _short(seconds: float) -> str:
    """Return a time with its unit, such as "58 µs", "1.2 ms" or "3.4 s"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.{1 if seconds < 10 * size else 0}f} {unit}"
    return f"{seconds / 1e-6:.0f} µs"
