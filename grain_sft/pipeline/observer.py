"""Table of observers by name, and functions that find the observers which are called for the batches of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from grain_sft.arguments import as_objects
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


@functools.cache
def standing_observers() -> tuple[Observer, ...]:
    """Return the observers of this process: metrics and the watchdog. They are called for all its pipelines."""
    return tuple(OBSERVERS[name]() for name in ("metrics", "watchdog"))


def other_observers(observers: Sequence[Observer]) -> tuple[Observer, ...]:
    """Check the types of a pipeline's observers. Return these observers without the standing observers."""
    objects = as_objects("observers", observers, Observer)
    return tuple(observer for observer in objects if observer not in standing_observers())


def observers_of(pipeline: Run) -> tuple[Observer, ...]:
    """Return the standing observers and the pipeline's own observers."""
    return (*standing_observers(), *pipeline.observers)
