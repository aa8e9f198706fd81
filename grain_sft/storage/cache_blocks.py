"""Files of the shard cache. Each file contains one block: consecutive bytes of a remote file.

A file has, in this order: 64 bytes with a hash that identifies the block, a CRC-32 of each 32 KiB of the block, and the block's
bytes. An unfinished file has the suffix .part. The process that fetches the block locks it. Files are not synced to disk. The
checksums reveal bytes that a power cut has lost.
"""

import contextlib
import hashlib
import os
import re
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.storage.atomic_file import remove_abandoned
from grain_sft.storage.locks import HeldLock, is_at
from grain_sft.storage.regular_files import pread
from grain_sft.storage.remote.files import RemoteFile, RemotePiece

PART = ".part"
BLOCKS = "blocks"  # subfolder of the cache's folder
LOCK_BYTES = 4096  # bytes of the cache's maximum size that are reserved for the lock file of `Space`
SPARE = 10  # a full cache frees at least 1/SPARE of its size, so that it need not list its folder for each new block

_MAGIC = b"GSFTBLK1"
_HEADER = 64  # bytes
_CHECKED_BYTES = 1 << 15  # bytes per checksum
_CHECKSUM = 4  # bytes
_LOCK = "space"
_NAME = re.compile(r"[0-9a-f]{32}-\d+-\d+(\.part)?")


class DamagedBlockError(Exception):
    """A file of the cache has other bytes than were written to it."""


def file_size(size: int) -> int:
    """Return the size of the file that stores a block of `size` bytes."""
    return _HEADER + _CHECKSUM * _num_checksums(size) + size


def _num_checksums(size: int) -> int:
    return -(-size // _CHECKED_BYTES)


class Block(NamedTuple):
    """Bytes [start, stop) of one version of a remote file."""

    file: RemoteFile
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def _data_offset(self) -> int:
        return file_size(self.size) - self.size

    def path(self, folder: str) -> str:
        """Return the path of the block's file in the cache `folder`."""
        key = self.file.key
        return os.path.join(folder, key[:2], f"{key}-{self.start}-{self.stop}")

    def read(self, fd: int, pieces: Sequence[RemotePiece], out: memoryview) -> None:
        """Copy pieces of the block from its open file `fd` to `out`, and check their checksums.

        Raises:
          DamagedBlockError: The file contains another block, or a checksum is wrong.
        """
        if pread(fd, _HEADER, 0) != self._header():
            raise DamagedBlockError("its first bytes do not name this block")
        for piece in pieces:
            start = piece.offset - self.start
            stop = start + piece.size
            # bytes 40,000 to 70,000 of a block need the checksums 1 and 2, which cover bytes 32,768 to 98,304
            first = start // _CHECKED_BYTES
            count = _num_checksums(stop) - first
            checked_start, checked_stop = first * _CHECKED_BYTES, min(self.size, (first + count) * _CHECKED_BYTES)
            checksums = pread(fd, _CHECKSUM * count, _HEADER + _CHECKSUM * first)
            data = memoryview(pread(fd, checked_stop - checked_start, self._data_offset + checked_start))
            if len(data) < checked_stop - checked_start or checksums != _checksums(data):
                raise DamagedBlockError(f"bytes {checked_start} to {checked_stop} are not those that were written")
            out[piece.place : piece.place + piece.size] = data[start - checked_start : stop - checked_start]

    def write(self, fd: int, offset: int, data: bytes) -> None:
        """Write a part of the block, and the checksums of the part, to the open file `fd`.

        Args:
          offset: Offset of the part in the remote file. The part begins a multiple of 32 KiB after the start of the block.
          data: Bytes of the part. Their number is a multiple of 32 KiB, except in the last part of the block.
        """
        start = offset - self.start
        # the checksums reveal a short write
        os.pwrite(fd, _checksums(memoryview(data)), _HEADER + _CHECKSUM * (start // _CHECKED_BYTES))
        os.pwrite(fd, data, self._data_offset + start)

    def finish(self, fd: int) -> None:
        """Write the first 64 bytes of the file, which identify the block. Call this after all parts are written."""
        os.pwrite(fd, self._header(), 0)

    def _header(self) -> bytes:
        name = hashlib.blake2b(f"{self.file.key}\0{self.start}\0{self.stop}".encode(), digest_size=32).digest()
        return (_MAGIC + name).ljust(_HEADER, b"\0")


def _checksums(data: memoryview) -> bytes:
    crcs = [zlib.crc32(data[at : at + _CHECKED_BYTES]) for at in range(0, len(data), _CHECKED_BYTES)]
    return np.array(crcs, "<u4").tobytes()


def claim(path: str) -> HeldLock | None:
    """Open the unfinished file `path`.part and lock it. Return None if another process or thread has locked it."""
    part = path + PART
    while True:
        try:
            lock = HeldLock(os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), wait=False)
        except FileNotFoundError:  # the folder does not exist yet, or a user removed it
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        except BlockingIOError:
            return None
        if is_at(lock.fd, part):
            return lock
        lock.release()  # another process renamed or removed the file before this process locked it


class Space:
    """Limit on the total size of the files in a folder. When a new file needs room, the least recently used files are removed.

    A lock file contains the number of bytes in use. A process adds the size of a file before it writes the file. So a killed
    process may leave the number too high. To correct the number, each process counts the bytes of all files on its first use of
    the cache, and whenever it needs room.
    """

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder = folder
        self._max = max_bytes - LOCK_BYTES
        self._has_counted = False

    def reserve(self, fd: int, size: int) -> bool:
        """Extend the open file `fd`, which `claim` opened, to `size` bytes. Return whether the cache has room for it.

        If not, truncate the file to 0 bytes.

        Raises:
          OSError: The disk is full, or the lock file can't be opened.
        """
        with self._locked() as lock:
            # don't count the bytes that a killed process may have left in this file: they are removed next
            used = self._used(lock) - os.fstat(fd).st_size
            os.ftruncate(fd, 0)
            if used + size > self._max:
                used = self._make_room(size)
            if used + size > self._max:
                self._record(lock, used)
                return False
            self._record(lock, used + size)
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError:
                os.ftruncate(fd, 0)
                raise
            return True

    def remove(self, path: str, fd: int) -> None:
        """Remove the file `path`, if it is still the open file `fd`."""
        with self._locked() as lock:
            if is_at(fd, path):
                used_by_others = self._used(lock) - os.fstat(fd).st_size
                os.unlink(path)
                self._record(lock, max(0, used_by_others))

    def publish(self, path: str) -> None:
        """Rename the finished file `path`.part to `path`."""
        with self._locked():  # without the lock, a process that lists the folder now might see both names or neither
            os.replace(path + PART, path)

    def _locked(self) -> HeldLock:
        return HeldLock(os.open(os.path.join(self._folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def _used(self, lock: HeldLock) -> int:
        """Return the number of bytes in use, from the lock file. On the first use in this process, list the files instead."""
        recorded = os.pread(lock.fd, 64, 0).strip()
        if self._has_counted and recorded.isdigit():
            return int(recorded)
        _, _, used = self._list()
        return used

    def _record(self, lock: HeldLock, used: int) -> None:
        os.pwrite(lock.fd, b"%-64d" % used, 0)
        self._has_counted = True

    def _make_room(self, size: int) -> int:
        """Remove finished files until `size` bytes, and at least a tenth of the cache, are free. Return the bytes in use.

        If `size` bytes would not fit even without finished files, remove nothing.
        """
        finished, unfinished_bytes, used = self._list()
        if unfinished_bytes + size > self._max:
            return used
        to_free = max(size, self._max // SPARE)
        for _, file_bytes, path in sorted(finished):  # the least recently used first
            if used + to_free <= self._max:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            used -= file_bytes
        return used

    def _list(self) -> tuple[list[tuple[int, int, str]], int, int]:
        """Return (last use, size, path) of each finished file, the bytes of unfinished files, and the bytes of all files.

        Remove unfinished files of killed processes.
        """
        finished, unfinished_bytes = [], 0
        subfolders = [entry.path for entry in os.scandir(self._folder) if entry.is_dir(follow_symlinks=False)]
        for subfolder in subfolders:
            for file in os.scandir(subfolder):
                if not _NAME.fullmatch(file.name):
                    continue
                with contextlib.suppress(FileNotFoundError):  # a user removed the file
                    status = file.stat(follow_symlinks=False)
                    if not file.name.endswith(PART):
                        finished.append((status.st_mtime_ns, status.st_size, file.path))
                    elif not remove_abandoned(file.path):
                        unfinished_bytes += status.st_size
        return finished, unfinished_bytes, unfinished_bytes + sum(file_bytes for _, file_bytes, _ in finished)
