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

_RELEASE_AFTER = 1 << 12  # gathers between two releases of the mapped pages

Identity = tuple[int, int, int]
"""Device, inode and time of the last write."""


class LocalFile:
    """An open file that closes itself when the last reader drops it.

    Attributes:
      address: Address of the first byte; 0 where the file is not mapped.
      identity: Identity of the file when its ends were last checked.
    """

    fd = -1  # so that `__del__` works if Ctrl-C arrives before `__init__`

    def __init__(self, shard: FileStamp, verified: Identity | None, scattered: bool) -> None:
        self.shard, self.data_offset = shard, shard.data_offset
        activity.doing[get_ident()] = activity.OPENING, shard
        try:
            with inside(shard.root):
                self.fd = open_regular(shard.path)
            if scattered and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            size, self.identity, ends_differ = self._state(verified)
        except GrainSftError:
            raise
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be opened ({error.strerror}). Check the mount, or map the path with path_remap."
            ) from error
        if size != shard.size or ends_differ:
            raise CorpusFileError(replaced(shard) if size == shard.size else size_change(shard, size))
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
        with contextlib.suppress(OSError):  # without it each page that is read brings megabytes of readahead
            self._map.madvise(mmap.MADV_RANDOM)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data

    def check_unchanged(self) -> None:
        """Check, after a read, the size of the file and, if it was written to since the last check, both ends."""
        try:
            status = os.fstat(self.fd)
            if status.st_mtime_ns == self.identity[2] and status.st_size == self.shard.size:
                if self._map is not None:
                    self._gathers += 1
                    if not self._gathers % _RELEASE_AFTER:  # otherwise the whole file would become resident
                        with contextlib.suppress(OSError):
                            self._map.madvise(mmap.MADV_DONTNEED)
                return
            size, identity, ends_differ = self._state(self.identity)
        except OSError as error:
            raise CorpusFileError(f"{self.shard.path}: can't be checked after a read ({error.strerror}).") from error
        if size != self.shard.size:
            raise self._cut(size)
        if ends_differ:
            raise CorpusFileError(replaced(self.shard))
        self.identity = identity

    def _cut(self, size: int) -> CorpusFileError:
        change = "cut short" if size <= self.shard.size else "appended to"
        return CorpusFileError(
            f"{self.shard.path}: the file has {size} bytes, expected {self.shard.size}: it was {change} while in use."
        )

    def _state(self, known: Identity | None) -> tuple[int, Identity, bool]:
        """Return the size, the identity, and whether the ends differ from the indexed ones; `known` ends are not read."""
        status = os.fstat(self.fd)
        identity = status.st_dev, status.st_ino, status.st_mtime_ns  # before the read, so that a later write is noticed
        if identity == known:
            return status.st_size, identity, False
        ends_differ = read_digest(self.fd, self.shard) != self.shard.digest
        # The size again, so that a file that was just cut is reported as cut, not as replaced.
        return os.fstat(self.fd).st_size, identity, ends_differ

    def read_again(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Fill `buffers` in turn from byte `offset`, after a vectored read that failed or came back short."""
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

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter exits
        if self.fd >= 0:
            close(self.fd)
