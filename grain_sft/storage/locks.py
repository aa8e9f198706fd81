"""Locks that survive forks and kills, and child processes that do not get Ctrl-C."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grain_sft.errors import StorageError

CACHE_DIR_VARIABLE = "GRAIN_SFT_CACHE_DIR"

_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()
_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


class ForkSafeLock:
    """A lock that is free in processes that are forked from this one, where the thread that held it does not exist.

    Attributes:
      lock: Lock to enter. It is one of C, so that no exception, as Ctrl-C, arrives between acquiring and entering it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _locks.add(self)


class HeldLock:
    """An exclusive lock of the open file `fd`, which this object closes in the end. Usable as a context.

    A process that is forked while the lock is held closes its copy of the descriptor: it would keep the lock for as long as it
    lives, whatever becomes of its parent.

    Raises:
      BlockingIOError: Another process holds the lock, and `wait` is false.
      OSError: The file system has no locks.
    """

    fd = -1  # also where an exception, as Ctrl-C, arrives before `__init__` begins

    def __init__(self, fd: int, *, wait: bool = True) -> None:
        self.fd = fd
        _held.add(self)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free the lock, also where children that were not forked by Python hold the file open, and close the file."""
        if self.fd < 0:
            return
        _held.discard(self)
        fd, self.fd = self.fd, -1
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:  # an exception, as Ctrl-C, arrived before the caller had this object
        self.release()


def is_at(fd: int, path: str) -> bool:
    """Return whether the open file `fd` still has this path."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


def _forked() -> None:
    """Free what the parent's threads held, and close the parent's locked files."""
    for each in list(_locks):
        each.lock = threading.Lock()
    for lock in list(_held):
        fd, lock.fd = lock.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of an unfinished file, so that one process of a machine makes it.

    Raises:
      StorageError: Its folder can't be written to, or has no locks.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: {target.name} can't be kept there ({error.strerror}). "
            f"Point ${CACHE_DIR_VARIABLE} to a folder on a local disk that can be written to."
        ) from error
    try:
        lock = HeldLock(fd)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: is on a file system without locks ({error.strerror}), which keep many processes from "
            f"making the same file. Point ${CACHE_DIR_VARIABLE} to a folder on a local disk."
        ) from error
    with lock:
        yield


@contextlib.contextmanager
def exclusive(fd: int, in_use: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the open file `fd`, which is closed in the end; do without where the file system has no locks."""
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    try:
        lock = HeldLock(fd, wait=wait)
    except BlockingIOError as error:
        raise StorageError(in_use) from error
    except OSError:
        pass
    with lock:
        yield


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Start processes that inherit a blocked SIGINT, because the process that starts them handles Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
