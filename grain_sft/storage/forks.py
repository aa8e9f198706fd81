"""Forks: locks that a forked process finds open, whichever thread of its parent held them, and signals that it ignores."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol


class HasLock(Protocol):
    """An object whose lock is held for moments only, and guards what is whole between any two lines."""

    _lock: threading.Lock


_holders: weakref.WeakSet[HasLock] = weakref.WeakSet()


def renew_lock(holder: HasLock) -> None:
    """Have `holder` get a new lock in processes that are forked from this one.

    Of the threads of a process only the one that forks is there in the child. What another held then, nobody would let go
    of: the child would wait for ever.
    """
    _holders.add(holder)


def _renew() -> None:
    for holder in list(_holders):
        holder._lock = threading.Lock()


os.register_at_fork(after_in_child=_renew)


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that do not get Ctrl-C: it is for the process that starts them, which ends them or goes on.

    A process inherits the signals that the thread which starts it blocks, also over exec.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
