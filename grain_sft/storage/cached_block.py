"""One block of a remote file, kept on the local disk with the checksum of every 32 KiB of it.

A file: 64 bytes that say which block it is, a CRC-32 of each 32 KiB, the bytes. While it is being made it has the suffix
.part and its maker holds its lock, which the kernel frees however the maker ends; it gets its name when it is whole. It
is not synced: what a power cut leaves of it has wrong checksums, and is fetched again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grain_sft.storage.regular_files import pread

CHECKED_BYTES = 1 << 15
PART = ".part"

_MAGIC = b"GSFTBLK1"
_HEADER = 64


class Wanted(NamedTuple):
    """`size` bytes of a block from byte `start` on, and where they belong in the output."""

    start: int
    place: int
    size: int


class DamagedBlockError(Exception):
    """A file of the cache that holds other bytes than were written."""


@dataclasses.dataclass(frozen=True)
class Block:
    """Bytes `start` to `stop` of one version of a remote file; `version` is the hash of all that tells it from others."""

    version: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Bytes of it."""
        return self.stop - self.start

    @property
    def file_size(self) -> int:
        """Bytes that it takes on the disk."""
        return _HEADER + 4 * _checks(self.size) + self.size

    def path(self, folder: str) -> str:
        """Where it is kept, or would be."""
        return os.path.join(folder, self.version[:2], f"{self.version}-{self.start}-{self.stop}")

    def read(self, fd: int, wanted: Sequence[Wanted], out: memoryview) -> None:
        """Copy what is wanted of the block from its open file, checked.

        Raises:
          DamagedBlockError: it is not what was written.
        """
        if pread(fd, _HEADER, 0) != self._header():
            raise DamagedBlockError("its beginning is of no such block")
        base = _HEADER + 4 * _checks(self.size)
        for start, place, size in wanted:
            first, last = start // CHECKED_BYTES, -(-(start + size) // CHECKED_BYTES)
            begin, end = first * CHECKED_BYTES, min(self.size, last * CHECKED_BYTES)
            expected = np.frombuffer(pread(fd, 4 * (last - first), _HEADER + 4 * first), "<u4")
            data = memoryview(pread(fd, end - begin, base + begin))
            if len(data) != end - begin or len(expected) != last - first or expected.tolist() != _sums(data):
                raise DamagedBlockError(f"bytes {begin} to {end} are not those that were written")
            out[place : place + size] = data[start - begin : start - begin + size]

    def write(self, fd: int, start: int, data: bytes) -> None:
        """Put bytes into the block's file from its byte `start` on, a multiple of 32 KiB, with their checksums.

        Raises:
          OSError: no space.
        """
        sums = np.array(_sums(memoryview(data)), "<u4").tobytes()
        _write_all(fd, sums, _HEADER + 4 * (start // CHECKED_BYTES))
        _write_all(fd, data, _HEADER + 4 * _checks(self.size) + start)

    def finish(self, fd: int) -> None:
        """Say in the file, all of whose bytes are written, which block it is.

        Raises:
          OSError: it can't be written to.
        """
        _write_all(fd, self._header(), 0)

    def _header(self) -> bytes:
        name = hashlib.blake2b(f"{self.version}\0{self.start}\0{self.stop}".encode(), digest_size=32).digest()
        return (_MAGIC + name).ljust(_HEADER, b"\0")


def claim(path: str) -> int | None:
    """The open file `path`.part, its lock held; None where another process or thread holds it.

    Raises:
      OSError: its folder can't be written to.
    """
    part = path + PART
    while True:
        try:
            fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:  # its folder: new, or emptied meanwhile
            os.makedirs(os.path.dirname(path), exist_ok=True)
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(part)):
                return fd
        os.close(fd)  # it was finished or removed between opening and locking


def _checks(size: int) -> int:
    return -(-size // CHECKED_BYTES)


def _sums(data: memoryview) -> list[int]:
    return [zlib.crc32(data[at : at + CHECKED_BYTES]) for at in range(0, len(data), CHECKED_BYTES)]


def _write_all(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
