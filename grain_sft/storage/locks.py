"""Locks of threads and files that forks and kills leave usable, and local files that appear when they are complete."""

import atexit
import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from grain_sft.errors import StorageError

CACHE_DIR_VARIABLE = "GRAIN_SFT_CACHE_DIR"

_UNFINISHED = re.compile(r"\..*\.(?P<host>[0-9a-f]{8})-\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_LONGEST_NAME = 150  # bytes of the target's name in that of its unfinished file
_ABANDONED_AFTER = 86_400.0  # seconds since the last write to another host's file, whose lock may be invisible here

_thread_locks: weakref.WeakSet["ForkSafeLock"] = weakref.WeakSet()
_file_locks: weakref.WeakSet["HeldLock"] = weakref.WeakSet()
_cleaned: set[str] = set()  # folders, once per process
_unfinished: set[str] = set()  # files to remove at exit, as Ctrl-C in native code ends the process while it writes


class ForkSafeLock:
    """Lock that is free in a forked process, where the thread that held it does not exist.

    Attributes:
      lock: Lock to enter. It is implemented in C, so that Ctrl-C cannot arrive between acquiring and entering it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        _thread_locks.add(self)


class HeldLock:
    """Exclusive lock of an open file, usable as a context. `release` frees the lock and closes the file.

    A forked child closes its copy of the descriptor, which would keep the lock for as long as the child lives.

    Args:
      fd: Descriptor of the open file.
      wait: Whether to wait while another process holds the lock.

    Raises:
      BlockingIOError: Another process holds the lock, and `wait` is false.
      OSError: The file system has no locks.
    """

    fd = -1  # set even if Ctrl-C arrives before `__init__` begins

    def __init__(self, fd: int, *, wait: bool = True) -> None:
        self.fd = fd
        _file_locks.add(self)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Free the lock and close the file, even if children that Python did not fork hold the file open."""
        if self.fd < 0:
            return
        _file_locks.discard(self)
        fd, self.fd = self.fd, -1
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __del__(self) -> None:  # Ctrl-C arrived before the caller had this object
        self.release()


def _forked() -> None:
    """Free the locks of the parent's threads, close the parent's locked files, and forget its unfinished files."""
    for each in list(_thread_locks):
        each.lock = threading.Lock()
    for lock in list(_file_locks):
        fd, lock.fd = lock.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _file_locks.clear()
    _unfinished.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _remove_unfinished() -> None:
    for path in _unfinished.copy():
        with contextlib.suppress(OSError):
            os.unlink(path)


def is_at(fd: int, path: str) -> bool:
    """Return whether `path` is still that of the open file `fd`."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), os.stat(path))
    return False


@contextlib.contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the lock of `target`, a file with the suffix `.lock` next to it, so that one process of a machine makes the target.

    Raises:
      StorageError: The folder can't be written to, or its file system has no locks.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(target.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: {target.name} can't be written there ({error.strerror}). "
            f"Point ${CACHE_DIR_VARIABLE} to a folder on a local disk that can be written to."
        ) from error
    try:
        lock = HeldLock(fd)
    except OSError as error:
        raise StorageError(
            f"{target.parent}: the file system has no locks ({error.strerror}), which keep processes from making the same "
            f"file at once. Point ${CACHE_DIR_VARIABLE} to a folder on a local disk."
        ) from error
    with lock:
        yield


@contextlib.contextmanager
def exclusive(fd: int, in_use: str, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock of the open file `fd` and close the file at the end. On a file system without locks, hold none.

    Raises:
      StorageError: Another process holds the lock, and `wait` is false. Its message is `in_use`.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(HeldLock(fd, wait=wait))
        except BlockingIOError as error:
            raise StorageError(in_use) from error
        except OSError:
            pass
        yield


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Block SIGINT, which processes that are started in the context inherit: only this process handles Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def write_whole(target: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a new local file that appears as `target` at the end of the context, complete and synced to disk.

    Until then it has a temporary name and its writer holds a lock. The kernel frees the lock however the writer ends.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(os.path.abspath(target.parent))
    path, lock = _create(target)
    _unfinished.add(path)
    try:
        with lock or contextlib.nullcontext():
            with open(os.dup(lock.fd) if lock else path, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        _unfinished.discard(path)


def sync_folder(folder: Path) -> None:
    """Sync the entries of `folder`, such as a new name of a file, to disk. Ignore errors: some network file systems can't."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _create(target: Path) -> tuple[str, HeldLock | None]:
    """Create an unfinished file next to `target`. Return its path and its lock, None if the file system has no locks."""
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    while True:
        path = os.path.join(target.parent, f".{name}.{_host()}-{os.getpid()}.{secrets.token_hex(4)}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            lock = HeldLock(fd, wait=False)
        except BlockingIOError:  # another process removes it as abandoned
            continue
        except OSError:
            return path, None
        if is_at(lock.fd, path):
            return path, lock
        lock.release()


def _clean(folder: str) -> None:
    """Remove unfinished files of dead processes from `folder`, once per process."""
    if folder in _cleaned:
        return
    _cleaned.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _UNFINISHED.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if match["host"] == _host() or age > _ABANDONED_AFTER:
                    remove_abandoned(entry.path)


def remove_abandoned(path: str) -> bool:
    """Remove an unfinished file and return True, or return False if a living process is writing it."""
    try:
        with HeldLock(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), wait=False):
            os.unlink(path)
        return True
    except BlockingIOError:
        return False


@functools.cache
def _host() -> str:
    """Return a hash of this machine's name and boot, 8 hex digits, which tells apart the machines that write to one folder."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # a sandbox may have no /proc, or refuse to read it
        name += Path("/proc/sys/kernel/random/boot_id").read_text()  # containers of two machines may have one name
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
