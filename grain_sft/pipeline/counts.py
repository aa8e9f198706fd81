"""Counts of batches, of the times to make them, and of the times that the training loop waited for them.

A batch only adds an entry to a list. `count_batches` counts many batches at once.
"""

import math
import os
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from grain_sft.pipeline.observer import standing_observers
from grain_sft.pipeline.run import Arrival, Run
from grain_sft.storage import ForkSafeLock, activity

T = TypeVar("T")

MOST_UNCOUNTED = 0 if "PROMETHEUS_MULTIPROC_DIR" in os.environ else 1 << 10
"""Number of batches that may wait to be counted. It is 0 if the metrics are files, which other processes may read any time."""


class IteratorStats:
    """Counts of the batches that an iterator delivered, and the times that `next` waited for them.

    Attributes:
      steps: Number of batches.
      tokens: Number of tokens of these batches, padding included.
      waited: Seconds inside `next`.
      longest: Longest wait, in seconds. Code that reads it may set it to 0, to find the longest wait from then on.
      next_step: Step after the last delivered step.
      waiting: Step that `next` waits for, and time of the call of `next` (`time.perf_counter`); None between calls.
      stalled: Copy of `waiting` that an observer sets during a long wait; else None. If it is set, the observers get a call of
        `stall_ended` after the wait.
    """

    # with a dict of attributes instead, materialized rows of long documents take 1.7 % longer (`bench --only packed`)
    __slots__ = ["_first_request", "_last_arrival", "longest", "next_step", "stalled", "steps", "tokens", "waited", "waiting"]

    def __init__(self) -> None:
        self.steps = self.tokens = self.next_step = 0
        self.waited = self.longest = 0.0
        self.waiting: tuple[int, float] | None = None
        self.stalled: tuple[int, float] | None = None
        self._first_request = self._last_arrival = 0.0

    @property
    def elsewhere(self) -> float:
        """Total seconds that the training loop spent between the arrival of a batch and the next call of `next`."""
        return self._last_arrival - self._first_request - self.waited

    def count(self, arrival: Arrival) -> bool:
        """Count a batch, and return whether it was new. If `next` is interrupted, the next call records the batch again."""
        _, step, shape, requested_at, arrived_at = arrival
        if arrived_at <= self._last_arrival:  # the second record has the time of the first
            return False
        if not self.steps:
            self._first_request = requested_at
        self.steps += 1
        self.tokens += math.prod(shape)
        self.next_step = step + 1
        waited = arrived_at - requested_at
        self.waited += waited
        self.longest = max(self.longest, waited)
        self._last_arrival = arrived_at
        return True


arrivals: list[Arrival] = []
"""Delivered batches that are not counted yet. Counting each batch on arrival would take 5 % of the time of a batch of windows
(`bench --only windows`), because each time, the counters would not be in the processor's cache any more."""

_make_seconds: list[float] = []  # seconds to make each batch that is not counted yet
_counting = ForkSafeLock()


def count_batches() -> None:
    """Count the batches made or delivered since the last call, in `IteratorStats`, `activity.recent` and the observers."""
    with _counting.lock:
        make_seconds, delivered = _taken(_make_seconds), _taken(arrivals)
        delivered = [arrival for arrival in delivered if arrival[0].count(arrival)]
        activity.recent.extend(make_seconds)
        if make_seconds or delivered:
            for observer in standing_observers():
                observer.batches_counted(make_seconds, delivered)


def _taken(values: list[T]) -> list[T]:
    """Remove and return the items of a list. Other threads may append to it meanwhile."""
    taken = values[:]
    del values[: len(taken)]
    return taken


# A forked child drops the batches that are not counted yet, because its parent counts them.
os.register_at_fork(after_in_child=arrivals.clear)
os.register_at_fork(after_in_child=_make_seconds.clear)


def make_batch(pipeline: Run, step: int, read: Callable[[int], Any] | None = None) -> Any:
    """Make the batch of `step`, record its time, call the observers, and return the batch.

    `read` replaces `pipeline[step]`. For example, it reads only some rows of the batch.
    """
    thread, since = get_ident(), time.perf_counter()
    activity.doing[thread] = activity.CHOOSING
    activity.making[thread] = step, since, pipeline
    try:
        batch = pipeline[step] if read is None else read(step)
    finally:
        activity.making.pop(thread, None)
    seconds = time.perf_counter() - since
    _make_seconds.append(seconds)
    if len(_make_seconds) > MOST_UNCOUNTED:
        count_batches()
    for observer in pipeline.observers:
        observer.batch_made(pipeline, step, seconds)
    return batch
