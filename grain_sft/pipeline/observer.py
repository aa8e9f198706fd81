"""Table of observers, and the observers of a run."""

import functools
from collections.abc import Callable

from grain_sft.errors import PipelineError
from grain_sft.pipeline.run import Observer, Run
from grain_sft.registry import Registry

OBSERVERS: Registry[Callable[..., Observer]] = Registry(
    "observer",
    PipelineError,
    {
        "audit": "grain_sft.provenance.audit:AuditLog",
        "metrics": "grain_sft.observers.metrics:of_process",
        "watchdog": "grain_sft.observers.watchdog:of_process",
    },
    base=Observer,
)
"""Observers by name. The rooms of these observers import this room, so the table imports them on first use."""


@functools.cache
def standing_observers() -> tuple[Observer, ...]:
    """Return metrics and the watchdog, which are called for all pipelines of this process."""
    return tuple(OBSERVERS[name]() for name in ("metrics", "watchdog"))


def observers_of(pipeline: Run) -> tuple[Observer, ...]:
    """Return the standing observers and the pipeline's own observers."""
    return (*standing_observers(), *pipeline.observers)
