"""Which threads of this process make batches now, and how long batches take to make."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from grain_sft import metrics

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline


class Making(NamedTuple):
    """A batch that a thread has been making since `since`, on `time.perf_counter`'s clock."""

    thread: int
    step: int
    since: float
    pipeline: Pipeline


Begun = tuple[int, int, float, "Pipeline"]
"""The fields of a `Making`, which take longer to name than to note."""

_now: dict[int, Begun] = {}  # by thread
_done: list[float] = [0.0, 0.0]
"""Batches that were made, and their seconds in all. No lock: of two that end at once one may get lost."""


def begin(step: int, pipeline: Pipeline) -> Begun:
    """This thread begins to make the batch of `step`."""
    thread = threading.get_ident()
    begun = _now[thread] = (thread, step, time.perf_counter(), pipeline)
    return begun


def end(begun: Begun, done: bool) -> None:
    """It is made, or failed."""
    _now.pop(begun[0], None)
    if done:
        seconds = time.perf_counter() - begun[2]
        _done[0] += 1
        _done[1] += seconds
        metrics.made(seconds)


def now() -> list[Making]:
    """What is being made, the oldest first."""
    return sorted((Making(*begun) for begun in _now.copy().values()), key=lambda making: making.since)


def mean_seconds() -> float | None:
    """Of the batches that were made in this process; None: none was."""
    return _done[1] / _done[0] if _done[0] else None


os.register_at_fork(after_in_child=_now.clear)
