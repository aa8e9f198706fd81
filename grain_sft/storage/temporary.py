"""Files in the making, and the locks that say that somebody still makes them.

A file in the making has a name that tells it from all others, and its maker holds its lock, which the kernel frees however
the maker ends. So whoever writes to the folder next can tell what a killed process left there, and removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import secrets
import socket
import time
import weakref
from pathlib import Path

_NAME = re.compile(r"\..*\.(?P<host>[0-9a-f]{8})-\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_LONGEST_NAME = 150  # bytes of the target's name
_ABANDONED_AFTER = 86_400.0  # seconds, of files of other hosts: their locks may not be seen here

_cleaned: set[str] = set()


class HeldLock:
    """An exclusive lock of an open file, which this closes in the end.

    A process that is forked while the lock is held lets go of its copy of the descriptor: it would keep the lock for as
    long as it lives, whatever becomes of its parent.

    Args:
      fd: descriptor of the file, which no other object closes.
      wait: whether to wait for another holder.

    Raises:
      BlockingIOError: somebody holds it, and `wait` is false.
      OSError: the file system has no locks.
    """

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
        if self.fd < 0:  # in a forked child
            return
        _held.discard(self)
        fd, self.fd = self.fd, -1
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
        finally:
            os.close(fd)

    def __del__(self) -> None:  # an exception, as Ctrl-C, arrived before anybody had this object
        self.release()


_held: weakref.WeakSet[HeldLock] = weakref.WeakSet()


def _let_go() -> None:
    for lock in list(_held):
        fd, lock.fd = lock.fd, -1
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


def create(target: Path) -> tuple[str, int, HeldLock | None]:
    """Make a new file beside `target`; remove what killed processes left in that folder.

    Returns:
      Its path; its descriptor, which the caller closes; and its lock, None where the file system has none.

    Raises:
      OSError: the folder can't be written to.
    """
    remove_abandoned(target.parent)
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    while True:
        path = os.path.join(target.parent, f".{name}.{_host()}-{os.getpid()}.{secrets.token_hex(4)}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            lock = HeldLock(os.dup(fd), wait=False)
        except BlockingIOError:  # another process takes it for abandoned, before it was locked
            os.close(fd)
            continue
        except OSError:
            return path, fd, None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return path, fd, lock
        lock.release()
        os.close(fd)


def remove_abandoned(folder: str | os.PathLike[str]) -> None:
    """Remove files in the making from `folder` whose makers are gone, once in the life of this process."""
    folder = os.path.abspath(folder)
    if folder in _cleaned:
        return
    _cleaned.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                own = match["host"] == _host()
                if own or time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_AFTER:
                    _remove_unlocked(entry.path)


def _remove_unlocked(path: str) -> None:
    """Remove a file that nobody holds the lock of.

    Raises:
      OSError: somebody does, or it can't be removed.
    """
    lock = HeldLock(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), wait=False)
    try:
        os.unlink(path)
    finally:
        lock.release()


@functools.cache
def _host() -> str:
    """What tells this machine from others that write to the same folder."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
