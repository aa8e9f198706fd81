"""Which threads of this process make batches now."""

from __future__ import annotations

import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol

from grain_sft.observers import metrics

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline
    from grain_sft.source.npy import Element


class Making(NamedTuple):
    """A batch that a thread has been making since `since`, on `time.perf_counter`'s clock."""

    thread: int
    step: int
    since: float
    pipeline: Pipeline


_now: dict[int, tuple[int, int, float, Pipeline]] = {}
"""By thread, the fields of a `Making`, which takes longer to make than to note."""


class Maker(Protocol):
    """What makes batches and says itself which one it makes: None while it makes none."""

    def making(self) -> Making | None: ...


_makers: weakref.WeakSet[Maker] = weakref.WeakSet()
_adding = [threading.Lock()]


def add(maker: Maker) -> None:
    """From now on, this one is asked too."""
    with _adding[0]:
        _makers.add(maker)


def make(pipeline: Pipeline, step: int) -> Element:
    """The batch of `step`; while it is made, by this thread, that is known."""
    thread, since = threading.get_ident(), time.perf_counter()
    _now[thread] = thread, step, since, pipeline
    try:
        batch = pipeline[step]
    finally:
        _now.pop(thread, None)
    metrics.made(time.perf_counter() - since)
    return batch


def now() -> list[Making]:
    """What is being made, the oldest first."""
    found = [Making(*begun) for begun in _now.copy().values()]
    with _adding[0]:
        makers = list(_makers)
    found += filter(None, [maker.making() for maker in makers])
    return sorted(found, key=lambda making: making.since)


def _forked() -> None:
    """This is a new process: none of the threads that made batches was taken along."""
    _now.clear()
    _adding[0] = threading.Lock()


os.register_at_fork(after_in_child=_forked)
