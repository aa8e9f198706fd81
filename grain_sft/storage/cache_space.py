"""The space of a cache folder: no more than so many bytes at any time, whoever writes to it; the least recently used
files make room."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from grain_sft.storage.cached_block import PART

BLOCKS = "blocks"
"""The folder within the cache's folder that has the files: whatever else is there is left alone."""

_LOCK = "space"
_NAME = re.compile(r"[0-9a-f]{32}-\d+-\d+(\.part)?")
_OF_ITS_OWN = 4096  # bytes that the lock file may take
_FULL_AGAIN = 10  # room is made for this part of the cache at once, so that the folder is not listed for every block


class _Entry(NamedTuple):
    used: int
    size: int
    path: str


class Space:
    """Counts the bytes of a folder's files, in a file that is also the lock of whoever changes them.

    What is about to be written is counted before it is, and what is removed is counted until it is gone; so a process
    that is killed leaves the count too high, never too low, and the next listing of the folder puts it right. Another
    boot of the machine counts anew.

    Args:
      folder: of the files.
      max_bytes: of all its files.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = folder
        self._max = max_bytes - _OF_ITS_OWN

    def reserve(self, fd: int, size: int) -> bool:
        """Make the claimed file `fd` `size` bytes long, after removing what was not used for longest where there is no
        room for it; False where there can't be.

        Raises:
          OSError: the disk is full, or the folder can't be written to.
        """
        with self._locked() as lock:
            used = self._used(lock)
            had = os.fstat(fd).st_size  # of a maker that was killed
            if had:
                os.ftruncate(fd, 0)
                used -= had
            if used + size > self._max:
                used = self._make_room(size)
            fits = used + size <= self._max
            self._note(lock, used + size if fits else used)
            if fits:
                try:
                    os.posix_fallocate(fd, 0, size)
                except OSError:
                    os.ftruncate(fd, 0)
                    self._note(lock, used)
                    raise
            return fits

    def remove(self, path: str, fd: int) -> None:
        """Remove the file `path` if it still is the open one.

        Raises:
          OSError: the folder can't be written to.
        """
        with self._locked() as lock, contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                used, size = self._used(lock), os.fstat(fd).st_size
                os.unlink(path)
                self._note(lock, max(0, used - size))

    def publish(self, path: str) -> None:
        """Give the whole file `path`.part its name; not while another process lists the folder.

        Raises:
          OSError: the folder can't be written to.
        """
        with self._locked():
            os.replace(path + PART, path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        fd = os.open(os.path.join(self._folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield fd
        finally:
            os.close(fd)

    def _used(self, lock: int) -> int:
        """Bytes that are taken or spoken for."""
        boot, _, count = os.pread(lock, 256, 0).decode("ascii", "replace").strip().partition(" ")
        if boot == _boot() and count.isdecimal():
            return int(count)
        used = sum(entry.size for entries in self._list() for entry in entries)
        self._note(lock, used)
        return used

    @staticmethod
    def _note(lock: int, used: int) -> None:
        os.pwrite(lock, f"{_boot()} {used}".ljust(128).encode(), 0)

    def _make_room(self, size: int) -> int:
        """Remove files until there is room for `size` bytes and some more, if that is possible; the bytes still taken."""
        whole, making = self._list()
        taken = sum(entry.size for entry in making)
        used = taken + sum(entry.size for entry in whole)
        if taken + size > self._max:
            return used
        goal = max(taken, min(self._max - size, self._max - self._max // _FULL_AGAIN))
        for entry in sorted(whole):
            if used <= goal:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path)
            used -= entry.size
        return used

    def _list(self) -> tuple[list[_Entry], list[_Entry]]:
        """The files of the cache: whole ones, and ones that a living process makes; those of dead ones are removed."""
        whole, making = [], []
        for folder in os.scandir(self._folder):
            for file in os.scandir(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                if not _NAME.fullmatch(file.name):
                    continue
                try:
                    found = file.stat(follow_symlinks=False)
                except FileNotFoundError:  # removed by hand
                    continue
                entry = _Entry(found.st_mtime_ns, found.st_size, file.path)
                if not file.name.endswith(PART):
                    whole.append(entry)
                elif _held(file.path):
                    making.append(entry)
        return whole, making


def _held(part: str) -> bool:
    """Whether a living process makes this file; removed, if not."""
    try:
        fd = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(part)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


@functools.cache
def _boot() -> str:
    """What tells this run of the machine from others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return "unknown"
