"""Local files that appear under their names only when they are complete.

A writer locks a temporary file, `.NAME.HOST-PID.RANDOM.tmp`, while it writes the file, and renames the file at the end. The
kernel frees the lock when the writer's process ends, even if the process is killed. So a temporary file without a lock is
abandoned.
"""

import atexit
import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from grain_sft.storage.locks import HeldLock, is_at

_TEMPORARY_NAME = re.compile(r"\..*\.(?P<host>[0-9a-f]{8})-\d+\.[0-9a-f]{8}\.tmp", re.DOTALL)
_LONGEST_NAME = 150  # maximum bytes of NAME; the whole name of the temporary file may have 255 bytes
# A file of another host is abandoned this many seconds after its last write. This host may not see the other host's lock.
_ABANDONED_AFTER = 86_400.0

_temporary_paths: set[str] = set()  # files that this process is writing


@atexit.register
def _remove_temporary_files() -> None:
    """Remove the temporary files of this process. Ctrl-C during native code may have left some."""
    for path in _temporary_paths.copy():
        with contextlib.suppress(OSError):
            os.unlink(path)


os.register_at_fork(after_in_child=_temporary_paths.clear)  # a forked child must not remove its parent's files


@contextlib.contextmanager
def write_whole(target: Path, mode: str) -> Iterator[IO[Any]]:
    """Yield a new file that appears as `target` at the end of the context, complete and synced to disk."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _clean(os.path.abspath(target.parent))
    path, lock = _create(target)
    _temporary_paths.add(path)
    try:
        with lock or contextlib.nullcontext():
            # The lock and `file` each close a descriptor, so `file` gets a duplicate. Without a lock, open the path again.
            with open(os.dup(lock.fd) if lock else path, mode, encoding=None if "b" in mode else "utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(path, target)
        sync_folder(target.parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
        _temporary_paths.discard(path)


def sync_folder(folder: Path) -> None:
    """Sync the names in `folder` to disk. Ignore errors, because some network file systems can't sync a folder."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _create(target: Path) -> tuple[str, HeldLock | None]:
    """Create a temporary file next to `target`. Return its path and lock. The lock is None if the file system has no locks."""
    name = os.fsdecode(os.fsencode(target.name)[:_LONGEST_NAME])
    while True:
        path = os.path.join(target.parent, f".{name}.{_host()}-{os.getpid()}.{secrets.token_hex(4)}.tmp")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            lock = HeldLock(fd, wait=False)
        except BlockingIOError:  # another process took the new file for abandoned, and has locked it to remove it
            continue
        except OSError:
            return path, None
        if is_at(lock.fd, path):
            return path, lock
        lock.release()  # another process removed the file before this process locked it


@functools.cache
def _clean(folder: str) -> None:
    """Remove abandoned temporary files from `folder`, once per process."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            match = _TEMPORARY_NAME.fullmatch(entry.name)
            if match is None or not entry.is_file(follow_symlinks=False):
                continue
            with contextlib.suppress(OSError):
                age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if match["host"] == _host() or age > _ABANDONED_AFTER:
                    remove_abandoned(entry.path)


def remove_abandoned(path: str) -> bool:
    """Remove an unfinished file and return True. If a process has locked the file, leave it and return False."""
    try:
        with HeldLock(os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), wait=False):
            os.unlink(path)
        return True
    except BlockingIOError:
        return False


@functools.cache
def _host() -> str:
    """Return a hash of this machine's name and of the id of its last boot, 8 hex digits."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):  # a sandbox may have no /proc, or refuse to read it
        name += Path("/proc/sys/kernel/random/boot_id").read_text()  # containers on two machines may have the same name
    return hashlib.blake2b(name.encode(), digest_size=4).hexdigest()


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[str]:
    """Yield a new temporary folder, and remove it at the end, even if Ctrl-C arrives during the removal.

    `TemporaryDirectory` alone leaves files behind if Ctrl-C interrupts its removal. So this function removes the folder first.
    If Ctrl-C interrupts this removal, `TemporaryDirectory` removes the remaining files.
    """
    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
