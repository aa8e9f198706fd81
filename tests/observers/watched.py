"""Helpers for tests of metrics and of the watchdog: make a small pipeline, read counters, and collect log messages."""

import logging
import re
import threading

import prometheus_client
from batches import pipeline_of

from grain_sft import NgramFilter, ShiftTargets, WindowLayout, open_corpus
from grain_sft.pipeline import standing_observers

standing_observers()  # creates all counters
LENGTH, ROWS, BATCH = 50, 40, 4
STALL = 0.1  # seconds of waiting that count as a stall in these tests


def make(where, *transforms, epochs=1, observers=(), **options):
    layout = WindowLayout(open_corpus(where, dtype="uint32", **options), LENGTH)
    transforms = [NgramFilter(max_count=5), ShiftTargets(), *transforms]
    return pipeline_of(layout, transforms, run={"observers": observers}, order="sequential", epochs=epochs)


def counted(name, **labels):
    """Return the value of a metric of grain_sft, or 0 before its first count."""
    return prometheus_client.REGISTRY.get_sample_value(f"grain_sft_{name}", labels) or 0.0


def counting(*names, **labels):
    """Return a function without arguments. It returns {name: growth of the counter since `counting` was called}."""
    before = {name: counted(name, **labels) for name in names}
    return lambda: {name: counted(name, **labels) - before[name] for name in names}


class Logged(logging.Handler):
    """A handler that keeps the messages of the log."""

    def __init__(self):
        super().__init__()
        self.lines, self._new = [], threading.Condition()

    def emit(self, record):
        with self._new:
            self.lines.append(record.getMessage())
            self._new.notify_all()

    def find(self, pattern):
        return re.findall(pattern, "\n".join(self.lines))

    def wait(self, pattern, seconds=300.0):
        with self._new:
            return self._new.wait_for(lambda: self.find(pattern), seconds)
