"""Unfinished files: each has a name of its own, and its maker holds its lock, which the kernel frees however the maker ends.

So the next process that writes to a folder recognises and removes what a killed one left there.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from grain_sft.storage.locks import HeldLock, is_at

_NAME = re.compile(r"\..*\.(?P<host>[0-9a-f]{8})-\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_LONGEST_NAME = 150  # bytes of the target's name
_ABANDONED_AFTER = 86_400.0  # seconds, of files of other hosts: their locks may not be seen here

_cleaned: set[str] = set()  # folders
_unfinished: set[str] = set()  # for a process that ends while it writes (Ctrl-C in native code)

os.register_at_fork(after_in_child=_unfinished.clear)


@atexit.register
def _remove_unfinished() -> None:
    for path in _unfinished.copy():
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def write_whole(target: Path, mode: str) -> Iterator[IO[Any]]:
    """Open a local file that appears as `target` whole, synced to disk, or not at all."""
    path, lock = "", None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(os.path.abspath(target.parent))
        path, fd, lock = _create(target)
        _unfinished.add(path)
        with os.fdopen(fd, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(path, target)
        with contextlib.suppress(OSError):  # some network file systems can't; the file itself is synced
            sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            if path:
                os.unlink(path)
        _unfinished.discard(path)
        if lock is not None:
            lock.release()


def sync_folder(folder: Path) -> None:
    """Write the names in `folder` to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _create(target: Path) -> tuple[str, int, HeldLock | None]:
    """Create an unfinished file next to `target`; return its path, its descriptor, and its lock where there are locks."""
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    while True:
        path = os.path.join(target.parent, f".{name}.{_host()}-{os.getpid()}.{secrets.token_hex(4)}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            lock = HeldLock(os.dup(fd), wait=False)
            if is_at(fd, path):
                return path, fd, lock
            lock.release()
        except BlockingIOError:  # another process takes it for abandoned, before it was locked
            pass
        except OSError:
            return path, fd, None
        os.close(fd)


def _remove_abandoned(folder: str) -> None:
    """Remove unfinished files of dead processes from `folder`, once in the life of this process."""
    if folder in _cleaned:
        return
    _cleaned.add(folder)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if match["host"] == _host() or age > _ABANDONED_AFTER:
                    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                    with HeldLock(os.open(entry.path, flags), wait=False):
                        os.unlink(entry.path)


@functools.cache
def _host() -> str:
    """Return what tells this machine from others that write to the same folder."""
    return hashlib.blake2b(socket.gethostname().encode(), digest_size=4).hexdigest()
