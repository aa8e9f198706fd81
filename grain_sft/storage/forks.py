"""Locks in forked processes, and processes that do not get Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator


class ForkSafeLock:
    """A lock that is free in processes that are forked from this one.

    Only the thread that forks exists in the child, so a lock that another thread held then would never be released.

    Attributes:
      lock: Lock to enter. It is one of C, so that no exception, as Ctrl-C, arrives between acquiring and entering it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _locks.add(self)


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _forked() -> None:
    for each in list(_locks):
        each.lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that do not get Ctrl-C, because the process that starts them handles it.

    A process inherits the signals that the thread which starts it blocks, also over exec.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
