"""Which remote bytes this process waits for, how often they were asked for, and why that failed."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import time
from collections.abc import Iterator


class Request:
    """Something that is asked of a remote file until it comes."""

    def __init__(self, what: str) -> None:
        self._what, self._since, self._tries, self._last = what, time.monotonic(), 1, ""

    def failed(self, why: str) -> None:
        """The last try failed, and is to be made again."""
        self._tries += 1
        self._last = why

    def __str__(self) -> str:
        tries = f", try {self._tries} (the last failed with {self._last})" if self._last else ""
        return f"waiting for {self._what} for {time.monotonic() - self._since:.1f} s{tries}"


_numbers = itertools.count()
_open: dict[int, Request] = {}
_current: contextvars.ContextVar[Request | None] = contextvars.ContextVar("grain_sft_request", default=None)


@contextlib.contextmanager
def open_request(what: str) -> Iterator[None]:
    """While this is entered, `what` is waited for; within another one of the same task, it is that one."""
    if _current.get() is not None:
        yield
        return
    number, request = next(_numbers), Request(what)
    _open[number] = request
    token = _current.set(request)
    try:
        yield
    finally:
        _current.reset(token)
        _open.pop(number, None)


def failed(why: str) -> None:
    """The last try of this task's request failed, and is to be made again."""
    request = _current.get()
    if request is not None:
        request.failed(why)


def open_requests() -> list[str]:
    """A sentence for each, the oldest first."""
    return [str(request) for _, request in sorted(_open.copy().items())]


os.register_at_fork(after_in_child=_open.clear)
