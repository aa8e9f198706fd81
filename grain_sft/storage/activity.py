"""Record of what each thread is doing now, and counters of what this process has done, for the watchdog and the metrics.

A thread records an operation as a format text and its values: `activity.doing[get_ident()] = OPENING, shard`. The text is
formatted only when the watchdog prints the record, so that recording stays cheap.
"""

import collections
import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Iterator
from threading import get_ident

from grain_sft.storage.locks import ForkSafeLock

CHOOSING = "choosing the rows of its batch"
OPENING = "opening {.path}"
READING = "reading {} pieces, the first from {.path} at byte {}"
COPYING = "reading {} pieces of {.path} and {} other files"
TRANSFORMING = "in the transform {0.__class__.__name__}"
REQUESTING = "asking for {} parts of remote files"
DOWNLOADING = "downloading {} parts of blocks into the shard cache, such as bytes {} to {} of {}"
AWAITING_BLOCK = "waiting for bytes {} to {} of {}, which {} downloads into the shard cache"

_NAMED_REQUESTS = 4  # maximum number of requests that `describe_makers` describes

doing: dict[int, tuple[object, ...]] = {}
"""Current operation by thread: a format text and its values."""

making: dict[int, tuple[int, float, object]] = {}
"""Batch that a thread makes now, by thread: the step, the start time by `time.perf_counter`, and the pipeline."""

recent: collections.deque[float] = collections.deque(maxlen=256)
"""Seconds that it took to make each of this process's last batches."""

counts = collections.Counter[str]()
"""Counters of this process; `grain_sft.observers.metrics` describes them. A forked process begins with its parent's counts."""

_lock = ForkSafeLock()


def count(name: str, amount: int) -> None:
    """Add to a counter."""
    with _lock.lock:
        counts[name] += amount


@contextlib.contextmanager
def making_batch(pipeline: object, step: int) -> Iterator[None]:
    """Record that this thread makes the batch of `step`."""
    thread = get_ident()
    doing[thread] = (CHOOSING,)
    making[thread] = step, time.perf_counter(), pipeline
    try:
        yield
    finally:
        making.pop(thread, None)


def describe_makers(pipeline: object = None) -> list[str]:
    """Return a line for each thread that makes a batch, oldest batch first, and then lines for the open requests.

    With `pipeline`, threads that make batches of other pipelines are left out. The requests are those of all pipelines.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for thread, (step, since, its_pipeline) in sorted(making.copy().items(), key=lambda item: item[1][1]):  # by start
        if pipeline is None or its_pipeline is pipeline:
            text, *values = doing.get(thread, ("no details",))
            seconds, operation = time.perf_counter() - since, str(text).format(*values)
            lines.append(f"{names.get(thread, thread)}: making step {step} for {seconds:.1f} s: {operation}")
    requests = [str(request) for request in list(_requests)]
    more = [f"and {len(requests) - _NAMED_REQUESTS} more such requests"] if len(requests) > _NAMED_REQUESTS else []
    return lines + requests[:_NAMED_REQUESTS] + more


class _Request:
    """An open request for bytes of a remote file."""

    def __init__(self, what: str) -> None:
        self.what, self.since, self.tries, self.failure = what, time.monotonic(), 1, ""

    def __str__(self) -> str:
        tries = f", try {self.tries} (the last failed with {self.failure})" if self.failure else ""
        return f"waiting for {self.what} for {time.monotonic() - self.since:.1f} s{tries}"


_requests: dict[_Request, None] = {}  # oldest first
_current: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("grain_sft_request", default=None)


@contextlib.contextmanager
def open_request(what: str) -> Iterator[None]:
    """Record that this task waits for `what`. A request that is opened inside another one is not recorded."""
    if _current.get() is not None:
        yield
        return
    request = _Request(what)
    _requests[request] = None
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
        _requests.pop(request, None)


def request_failed(reason: str) -> None:
    """Record that the last try of this task's request failed. The request is tried again."""
    count("remote_retries", 1)
    if (request := _current.get()) is not None:
        request.tries, request.failure = request.tries + 1, reason


def _forked() -> None:
    """Forget the threads of the parent process."""
    doing.clear()
    making.clear()
    _requests.clear()


os.register_at_fork(after_in_child=_forked)
