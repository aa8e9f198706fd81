"""Forks: locks that a forked process finds open, whichever thread of its parent held them."""

from __future__ import annotations

import os
import threading
import weakref
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
