"""Which threads of this process make batches now, and how long batches take to make."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from grain_sft import metrics

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline
    from grain_sft.sources import Element


class Making(NamedTuple):
    """A batch that a thread has been making since `since`, on `time.perf_counter`'s clock."""

    thread: int
    step: int
    since: float
    pipeline: Pipeline


_now: dict[int, tuple[int, int, float, Pipeline]] = {}
"""By thread, the fields of a `Making`, which takes longer to make than to note."""
_seconds: deque[float] = deque(maxlen=256)
"""What each of the last batches that were made took."""


def make(pipeline: Pipeline, step: int, since: float | None = None) -> Element:
    """The batch of `step`; while it is made, by this thread, that is known.

    Args:
      since: when it was begun; None: now.
    """
    thread = threading.get_ident()
    since = since or time.perf_counter()
    _now[thread] = thread, step, since, pipeline
    try:
        batch = pipeline[step]
    finally:
        _now.pop(thread, None)
    seconds = time.perf_counter() - since
    _seconds.append(seconds)
    metrics.made(seconds)
    return batch


def now() -> list[Making]:
    """What is being made, the oldest first."""
    return sorted((Making(*begun) for begun in _now.copy().values()), key=lambda making: making.since)


def mean_seconds() -> float | None:
    """Of the last batches that were made in this process; None: none was."""
    seconds = list(_seconds)
    return sum(seconds) / len(seconds) if seconds else None


os.register_at_fork(after_in_child=_now.clear)
