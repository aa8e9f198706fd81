"""Record of the current operation of each thread and of the open requests, and counters of this process.

A thread records a function and its arguments: `activity.doing[get_ident()] = OPENING, shard`. If a batch takes long, the
watchdog (`grain_sft.observers`) calls the function. The result is a text about the operation.
"""

import collections
import contextlib
import contextvars
import os
import threading
import time
from collections.abc import Iterator
from threading import get_ident
from typing import Any

CHOOSING = ("choosing the rows of its batch".format,)  # an entry of `doing` without arguments
OPENING = "opening {.path}".format
COPYING = "reading {} pieces of {.path} and {} other files".format
TRANSFORMING = "in the transform {0.__class__.__name__}".format
REQUESTING = "asking for {} parts of remote files".format
DOWNLOADING = "downloading {} parts of blocks into the shard cache, such as bytes {} to {} of {}".format
AWAITING_BLOCK = "waiting for bytes {} to {} of {}, which {} downloads into the shard cache".format

_NAMED_REQUESTS = 4  # maximum number of requests that `describe_makers` lists one by one

doing: dict[int, tuple[Any, ...]] = {}  # by thread: function that describes the current operation, and its arguments
making: dict[int, tuple[int, float, object]] = {}  # by thread: step, start time and pipeline of the batch
recent: collections.deque[float] = collections.deque(maxlen=256)  # seconds that each of the last batches took to make
_amounts: dict[tuple[str, int], int] = {}  # by counter and thread; a forked child begins with its parent's amounts


def count(name: str, amount: int) -> None:
    """Add `amount` to the counter `name`."""
    # Each thread has its own amount, so no lock is needed. With a lock, reading materialized rows takes 0.4 %
    # longer (`bench --only packed`).
    key = name, get_ident()
    _amounts[key] = _amounts.get(key, 0) + amount


class _Counts:
    """Values of the counters, by name: `counts["local_bytes"]` is the sum over all threads."""

    def __getitem__(self, name: str) -> int:
        return sum(amount for (counter, _), amount in _amounts.copy().items() if counter == name)


counts = _Counts()


def describe_makers(pipeline: object = None) -> list[str]:
    """Return lines about the batches that threads make now, then about the open requests, both sorted by start time.

    If `pipeline` is given, only its batches are listed. Requests are listed for all pipelines: up to four, then the number of
    the others.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    oldest_first = sorted(making.copy().items(), key=lambda item: item[1][1])
    for thread, (step, since, its_pipeline) in oldest_first:
        if pipeline is None or its_pipeline is pipeline:
            describe, *arguments = doing.get(thread, ("no details".format,))
            seconds = time.perf_counter() - since
            lines.append(f"{names.get(thread, thread)}: making step {step} for {seconds:.1f} s: {describe(*arguments)}")
    requests = list(map(str, list(_requests)))  # the inner list is a copy: other threads change `_requests`
    if (more := len(requests) - _NAMED_REQUESTS) > 0:
        requests[_NAMED_REQUESTS:] = [f"and {more} more such requests"]
    return lines + requests


class _Request:
    """A request that an asyncio task waits for, with the number of tries and the reason of the last failure."""

    def __init__(self, what: str) -> None:
        self.what, self.since, self.tries, self.failure = what, time.monotonic(), 1, ""

    def __str__(self) -> str:
        tries = f", try {self.tries} (the last failed with {self.failure})" if self.failure else ""
        return f"waiting for {self.what} for {time.monotonic() - self.since:.1f} s{tries}"


_requests: dict[_Request, None] = {}  # oldest first
_current: contextvars.ContextVar[_Request | None] = contextvars.ContextVar("grain_sft_request", default=None)


@contextlib.contextmanager
def open_request(what: str) -> Iterator[None]:
    """Record that this asyncio task waits for `what` in this context. A request inside another request is not recorded.

    `what` names bytes of a remote file, or the whole file.
    """
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
    """Record that this task's request failed for the reason `reason`, and will be repeated."""
    count("remote_retries", 1)
    if (request := _current.get()) is not None:
        request.tries, request.failure = request.tries + 1, reason


for _record in (doing, making, _requests):
    os.register_at_fork(after_in_child=_record.clear)  # a forked child does not have its parent's threads
