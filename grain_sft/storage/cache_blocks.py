"""Files of the shard cache: 64 bytes that name the block, a CRC-32 of each 32 KiB, and the bytes of the block.

An unfinished file has the suffix .part, and its maker holds its lock. Files are not synced: the checksums reveal a power cut.
"""

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.storage.locks import HeldLock, is_at, remove_abandoned
from grain_sft.storage.regular_files import pread
from grain_sft.storage.remote.files import RemoteFile, RemotePiece

PART = ".part"
BLOCKS = "blocks"
"""Folder within the cache's folder that has the files: whatever else is in the cache's folder is left alone."""

_MAGIC = b"GSFTBLK1"
_HEADER = 64
_CHECKED_BYTES = 1 << 15  # per checksum
_LOCK = "space"
LOCK_BYTES = 4096  # largest size of the lock file
_NAME = re.compile(r"[0-9a-f]{32}-\d+-\d+(\.part)?")
SPARE = 10  # 1/10 of the cache is freed at once, so that the folder is not listed for every block


class DamagedBlockError(Exception):
    """A file of the cache whose bytes are not those that were written."""


def file_size(size: int) -> int:
    """Return the bytes that a block of `size` bytes takes on the disk."""
    return _HEADER - 4 * (-size // _CHECKED_BYTES) + size


class Block(NamedTuple):
    """Bytes `start` to `stop` of one version of a remote file."""

    file: RemoteFile
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.stop - self.start

    @property
    def _data_offset(self) -> int:
        return self.file_size - self.size

    @property
    def file_size(self) -> int:
        """Bytes that the block takes on the disk."""
        return file_size(self.size)

    def path(self, folder: str) -> str:
        """Return the path of the block's file."""
        key = self.file.key
        return os.path.join(folder, key[:2], f"{key}-{self.start}-{self.stop}")

    def read(self, fd: int, pieces: Sequence[RemotePiece], out: memoryview) -> None:
        """Copy pieces of the block from its open file."""
        if pread(fd, _HEADER, 0) != self._header():
            raise DamagedBlockError("its first bytes do not name this block")
        for _, offset, place, size in pieces:
            start = offset - self.start
            first, last = start // _CHECKED_BYTES, -(-(start + size) // _CHECKED_BYTES)
            begin, end = first * _CHECKED_BYTES, min(self.size, last * _CHECKED_BYTES)
            expected = np.frombuffer(pread(fd, 4 * (last - first), _HEADER + 4 * first), "<u4")
            data = memoryview(pread(fd, end - begin, self._data_offset + begin))
            if len(data) != end - begin or len(expected) != last - first or expected.tolist() != _sums(data):
                raise DamagedBlockError(f"bytes {begin} to {end} are not those that were written")
            out[place : place + size] = data[start - begin : start - begin + size]

    def write(self, fd: int, offset: int, data: bytes) -> None:
        """Write bytes from `offset` of the remote file on, which is N * 32 KiB after the block's start, and their checksums."""
        start = offset - self.start
        _write_all(fd, np.array(_sums(memoryview(data)), "<u4").tobytes(), _HEADER + 4 * (start // _CHECKED_BYTES))
        _write_all(fd, data, self._data_offset + start)

    def finish(self, fd: int) -> None:
        """Name the block in its file, after all bytes are written."""
        _write_all(fd, self._header(), 0)

    def _header(self) -> bytes:
        name = hashlib.blake2b(f"{self.file.key}\0{self.start}\0{self.stop}".encode(), digest_size=32).digest()
        return (_MAGIC + name).ljust(_HEADER, b"\0")


def _sums(data: memoryview) -> list[int]:
    return [zlib.crc32(data[at : at + _CHECKED_BYTES]) for at in range(0, len(data), _CHECKED_BYTES)]


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def claim(path: str) -> HeldLock | None:
    """Open the file `path`.part and take its lock. Return None if another process or thread holds the lock."""
    part = path + PART
    while True:
        try:
            lock = HeldLock(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), wait=False)
        except FileNotFoundError:  # its folder: new, or emptied meanwhile
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        except BlockingIOError:
            return None
        if is_at(lock.fd, part):
            return lock
        lock.release()  # the file was finished or removed between opening and locking


class Space:
    """Bound on the bytes of the files in a folder. The least recently used files make room for new ones.

    A lock file counts the bytes: before they are written, and until they are removed, so that a killed process leaves the
    count too high, never too low. The first use in a process, and every search for room, counts the files anew.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self._max, self._counted = folder, max_bytes - LOCK_BYTES, False

    def reserve(self, fd: int, size: int) -> bool:
        """Make the claimed file `fd` `size` bytes long; return False if the folder has no room for it."""
        with self._locked() as lock:
            used = self._used(lock) - os.fstat(fd).st_size  # bytes that a killed maker left
            os.ftruncate(fd, 0)
            if used + size > self._max:
                used = self._make_room(size)
            fits = used + size <= self._max
            self._record(lock, used + size if fits else used)
            try:
                if fits:
                    os.posix_fallocate(fd, 0, size)
            except OSError:
                os.ftruncate(fd, 0)
                raise
            return fits

    def remove(self, path: str, fd: int) -> None:
        """Remove the file `path` if it is still the file that is open as `fd`."""
        with self._locked() as lock:
            if is_at(fd, path):
                used, size = self._used(lock), os.fstat(fd).st_size
                os.unlink(path)
                self._record(lock, max(0, used - size))

    def publish(self, path: str) -> None:
        """Give the whole file `path`.part its name; not while another process lists the folder."""
        with self._locked():
            os.replace(path + PART, path)

    def _locked(self) -> HeldLock:
        return HeldLock(os.open(os.path.join(self._folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def _used(self, lock: HeldLock) -> int:
        """Return the number of bytes that are taken or reserved."""
        count = os.pread(lock.fd, 64, 0).strip()
        if not (self._counted and count.isdigit()):
            whole, unfinished = self._list()
            return unfinished + sum(size for _, size, _ in whole)
        return int(count)

    def _record(self, lock: HeldLock, used: int) -> None:
        os.pwrite(lock.fd, b"%-64d" % used, 0)
        self._counted = True

    def _make_room(self, size: int) -> int:
        """Remove files until there is room for `size` bytes and some more; return the bytes still taken."""
        whole, unfinished = self._list()
        used = unfinished + sum(size for _, size, _ in whole)
        goal = max(unfinished, min(self._max - size, self._max - self._max // SPARE))
        for _, freed, path in sorted(whole) if unfinished + size <= self._max else ():
            if used <= goal:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= freed
        return used

    def _list(self) -> tuple[list[tuple[int, int, str]], int]:
        """Return (last use, size, path) of whole files, and the bytes of unfinished ones; remove those of dead processes."""
        whole, unfinished = [], 0
        for folder in os.scandir(self._folder):
            for file in os.scandir(folder.path) if folder.is_dir(follow_symlinks=False) else ():
                if not _NAME.fullmatch(file.name):
                    continue
                with contextlib.suppress(FileNotFoundError):  # removed by hand
                    found = file.stat(follow_symlinks=False)
                    if not file.name.endswith(PART):
                        whole.append((found.st_mtime_ns, found.st_size, file.path))
                    elif not remove_abandoned(file.path):
                        unfinished += found.st_size
        return whole, unfinished
