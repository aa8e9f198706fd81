"""An open local file of a corpus, checked against its stamp when it is opened and after each read."""

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable
from threading import get_ident

import numpy as np

from grain_sft.errors import CorpusFileError, GrainSftError
from grain_sft.storage import activity
from grain_sft.storage.file_stamp import FileStamp, read_digest, replaced, size_change
from grain_sft.storage.regular_files import inside, open_regular

_RELEASE_AFTER = 1 << 12  # gathers after which the pages that a map has touched are released

Stamp = tuple[int, int, int]
"""Device, inode and time of the last change."""


class LocalFile:
    """An open file that closes itself when the last reader drops it.

    Attributes:
      address: Address of the first byte; 0 where the file is not mapped.
      stamp: Stamp of the file when its ends were last checked.
    """

    fd = -1  # set even if Ctrl-C arrives before `__init__` begins

    def __init__(self, shard: FileStamp, verified: Stamp | None, scattered: bool) -> None:
        self.shard, self.data_offset = shard, shard.data_offset
        activity.doing[get_ident()] = activity.OPENING, shard
        try:
            with inside(shard.root):
                self.fd = open_regular(shard.path)
            if scattered and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            found, self.stamp, other = self._state(verified)
        except GrainSftError:
            raise
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be opened ({error.strerror}). Check the mount, or map the path with path_remap."
            ) from error
        if found != shard.size or other:
            raise CorpusFileError(replaced(shard) if found == shard.size else size_change(shard, found))
        self.address = 0
        self._map: mmap.mmap | None = None
        self._gathers = 0

    def map(self) -> None:
        """Map the file, if possible. The map has a second descriptor and lives as long as this object. No two threads call
        this at once."""
        if self._map is not None:
            return
        try:
            self._map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):  # a file system without maps, or a file that is empty now
            return
        with contextlib.suppress(OSError):  # otherwise a page that is read from the disk brings megabytes with it
            self._map.madvise(mmap.MADV_RANDOM)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data

    def check_unchanged(self) -> None:
        """Check, after a read, the size of the file and, if it was written to since the last check, both ends."""
        try:
            status = os.fstat(self.fd)
            if status.st_mtime_ns == self.stamp[2] and status.st_size == self.shard.size:
                if self._map is not None:
                    self._gathers += 1
                    if not self._gathers % _RELEASE_AFTER:  # otherwise the whole file would become resident
                        with contextlib.suppress(OSError):
                            self._map.madvise(mmap.MADV_DONTNEED)
                return
            found, stamp, other = self._state(self.stamp)
        except OSError as error:
            raise CorpusFileError(f"{self.shard.path}: can't be checked after a read ({error.strerror}).") from error
        if found != self.shard.size:
            raise self._cut(found)
        if other:
            raise CorpusFileError(replaced(self.shard))
        self.stamp = stamp

    def _cut(self, found: int) -> CorpusFileError:
        change = "cut short" if found <= self.shard.size else "appended to"
        return CorpusFileError(
            f"{self.shard.path}: the file has {found} bytes, expected {self.shard.size}: it was {change} while in use."
        )

    def _state(self, known: Stamp | None) -> tuple[int, Stamp, bool]:
        """Return size, stamp, and whether the ends differ from the indexed ones. They are not read if the stamp is `known`."""
        status = os.fstat(self.fd)
        if (status.st_dev, status.st_ino, status.st_mtime_ns) == known:
            return status.st_size, known, False
        other = read_digest(self.fd, self.shard) != self.shard.digest
        status = os.fstat(self.fd)  # again: a file that has just been cut also has other ends
        return status.st_size, (status.st_dev, status.st_ino, status.st_mtime_ns), other

    def read_again(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Fill `buffers`, one after the other, with the bytes of the file from `offset` on."""
        for out in buffers:
            while out:
                try:
                    count = os.preadv(self.fd, (out,), offset)
                except OSError as error:
                    raise CorpusFileError(
                        f"{self.shard.path}: can't be read at byte {offset} ({error.strerror})."
                    ) from error
                if not count:
                    raise self._cut(os.fstat(self.fd).st_size)
                out, offset = out[count:], offset + count

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        if self.fd >= 0:
            close(self.fd)
