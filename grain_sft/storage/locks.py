"""Locks between threads, which stay usable after a fork, and locks of files, which are freed if their process is killed."""

import contextlib
import fcntl
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

from grain_sft.errors import StorageError

CACHE_DIR_VARIABLE = "GRAIN_SFT_CACHE_DIR"

_thread_locks: weakref.WeakSet["ForkSafeLock"] = weakref.WeakSet()
_file_locks: weakref.WeakSet["HeldLock"] = weakref.WeakSet()


class ForkSafeLock:
    """Lock that a forked child finds free, even if a thread of the parent holds it.

    Attributes:
      lock: Lock to enter, as `with fork_safe.lock:`. Read this attribute each time, because a fork replaces it in the child.
        Ctrl-C can't leave the lock held: `threading.Lock` is written in C, so it runs no Python code to interrupt.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _thread_locks.add(self)


class HeldLock(contextlib.AbstractContextManager["HeldLock"]):
    """Exclusive lock of the open file `fd`. `release`, or the end of the context, frees the lock and closes the file.

    If the file can't be locked, the constructor closes it. A forked child closes its copy of the descriptor, because an open
    copy would keep the lock.

    Args:
      wait: Whether to wait until no other process holds the lock.

    Raises:
      BlockingIOError: Another process holds the lock, and `wait` is false.
      OSError: The file system has no locks.
    """

    fd = -1  # so that `release` works if Ctrl-C arrives before `__init__` has set it

    def __init__(self, fd: int, *, wait: bool = True) -> None:
        self.fd = fd
        _file_locks.add(self)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free the lock and close the file. A second call does nothing."""
        if self.fd < 0:
            return
        _file_locks.discard(self)
        fd, self.fd = self.fd, -1
        try:
            # closing alone would not free the lock if native code has forked a child: the child has a copy of the descriptor
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:  # in case Ctrl-C arrives before the caller has this object
        self.release()


def _reset_in_child() -> None:
    """Free the locks of the parent's threads, and close the parent's locked files without unlocking them."""
    for thread_lock in list(_thread_locks):
        thread_lock.lock = threading.Lock()
    for file_lock in list(_file_locks):
        fd, file_lock.fd = file_lock.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _file_locks.clear()


os.register_at_fork(after_in_child=_reset_in_child)


def is_at(fd: int, path: str) -> bool:
    """Return whether `path` still leads to the open file `fd`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, so that only one process of the machine makes it. `plan.arrays` has the lock file `plan.lock`.

    Raises:
      StorageError: The folder can't be written to, or its file system has no locks.
    """
    problem = f"{target.name} can't be written there"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        problem = "the file system has no locks"
        lock = HeldLock(fd)
    except OSError as error:
        fix = f"Point ${CACHE_DIR_VARIABLE} to a folder on a local disk that can be written to"
        raise StorageError(f"{target.parent}: {problem} ({error.strerror}). {fix}.") from error
    with lock:
        yield


@contextlib.contextmanager
def exclusive(fd: int, in_use: str, *, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of the open file `fd` in this context, and close the file at the end. `wait` is as in `HeldLock`.

    Yield whether the lock is held. On a file system without locks, the file is closed at once, and the value is False.

    Raises:
      StorageError: Another process holds the lock, and `wait` is false. The message is `in_use`.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(HeldLock(fd, wait=wait))
            is_held = True
        except BlockingIOError as error:
            raise StorageError(in_use) from error
        except OSError:
            is_held = False
        yield is_held


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT in this thread. Processes that start in this context inherit the block, so only this one handles Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
