"""Open local files of a corpus.

A stamp is the state of a file when it was indexed: its size, and a hash of its ends (its first and last bytes). A file is
compared with its stamp when it is opened. After each read, the size and the time of modification are checked.
"""

import contextlib
import mmap
import os
import resource
from collections.abc import Callable, Iterable, Sequence
from threading import get_ident
from typing import NamedTuple

import numpy as np

from grain_sft.errors import CorpusFileError, GrainSftError
from grain_sft.storage import activity
from grain_sft.storage.file_stamp import FileStamp, read_digest, replaced, size_change
from grain_sft.storage.locks import ForkSafeLock
from grain_sft.storage.regular_files import inside, open_regular

MOST_OPEN_FILES = 1024
"""Default maximum of the file descriptors that an `OpenFiles` has."""


class Identity(NamedTuple):
    """Values of a file. At least one of them changes if the file is replaced or written to."""

    device: int
    inode: int
    mtime_ns: int


class LocalFile:
    """An open file. It is closed when the last reference to it is dropped.

    Args:
      shard: Stamp of the file.
      verified: `identity` of an earlier LocalFile of this file, or None. If the file still has this identity, its ends are not
        hashed again.
      scattered: Whether reads are far apart, so that the system need not read ahead.

    Attributes:
      address: Address of the first byte in memory; 0 unless the file is mapped.
      identity: Identity of the file when it last matched the stamp.
    """

    fd = -1  # so that `__del__` works if Ctrl-C arrives before `__init__` has set it

    def __init__(self, shard: FileStamp, verified: Identity | None, scattered: bool) -> None:
        self.shard, self.data_offset = shard, shard.data_offset
        activity.doing[get_ident()] = activity.OPENING, shard  # what this thread does, for a message if it takes long
        try:
            with inside(shard.root):
                self.fd = open_regular(shard.path)
            if scattered:
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            self.identity = self._verify(verified)
        except GrainSftError:  # some are OSErrors
            raise
        except OSError as error:
            problem = f"{shard.path}: can't be opened ({error.strerror})"
            raise CorpusFileError(f"{problem}. Check the mount, or map the path with path_remap.") from error
        self.address = 0
        self._map: mmap.mmap | None = None

    def map(self) -> None:
        """Map the file into memory, if its file system allows. Two threads must not call this at once."""
        if self._map is not None:
            return
        try:
            self._map = mmap.mmap(self.fd, self.shard.size, mmap.MAP_SHARED, mmap.PROT_READ)
        except (OSError, ValueError):  # ValueError: the file has been cut
            return
        with contextlib.suppress(OSError):  # without MADV_RANDOM, the system reads megabytes ahead for each page
            self._map.madvise(mmap.MADV_RANDOM)
        self.address = np.frombuffer(self._map, np.uint8).ctypes.data

    def check_unchanged(self) -> None:
        """Raise a CorpusFileError if the file differs from the file that was indexed."""
        try:
            status = os.fstat(self.fd)
            if status.st_mtime_ns != self.identity.mtime_ns or status.st_size != self.shard.size:
                self.identity = self._verify(self.identity)
        except GrainSftError:  # some are OSErrors
            raise
        except OSError as error:
            problem = f"{self.shard.path}: can't be checked after a read ({error.strerror})"
            raise CorpusFileError(f"{problem}. Check the mount.") from error

    def release_pages(self) -> None:
        """Free the memory of the pages that were read from the map. Otherwise, the whole file may stay in memory."""
        if self._map is not None:
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)

    def _verify(self, verified: Identity | None) -> Identity:
        """Return the file's identity. Raise a CorpusFileError if the file differs from its stamp."""
        # read the identity before the ends: if a write changes the file meanwhile, the next check compares again
        status = os.fstat(self.fd)
        identity = Identity(status.st_dev, status.st_ino, status.st_mtime_ns)
        ends_match = identity == verified or read_digest(self.fd, self.shard) == self.shard.digest
        size = os.fstat(self.fd).st_size  # after the ends: a file that was cut meanwhile is reported as cut
        if size != self.shard.size:
            raise CorpusFileError(size_change(self.shard, size))
        if not ends_match:
            raise CorpusFileError(replaced(self.shard))
        return identity

    def read_again(self, offset: int, buffers: Iterable[memoryview]) -> None:
        """Fill `buffers` in turn from byte `offset`, after a vectored read that failed or came back short.

        Raises:
          CorpusFileError: A read fails again, or the file ends before the buffers are full.
        """
        for buffer in buffers:
            unfilled = buffer.cast("B")
            while unfilled:
                try:
                    count = os.preadv(self.fd, (unfilled,), offset)
                except OSError as error:
                    problem = f"{self.shard.path}: can't be read at byte {offset} ({error.strerror})"
                    raise CorpusFileError(f"{problem}. Check the disk or the mount.") from error
                if not count:
                    raise CorpusFileError(size_change(self.shard, os.fstat(self.fd).st_size))
                unfilled = unfilled[count:]
                offset += count

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when the interpreter exits
        if self.fd >= 0:
            close(self.fd)


class OpenFiles(dict[int, LocalFile]):
    """Open files by their number in `shards`. `open_files[number]` opens the file if it is not open. Thread-safe.

    If another file would need more than `max_open_files` descriptors in all, the file that was opened first is dropped. It is
    closed when no thread reads from it any more. None means `MOST_OPEN_FILES`, or a quarter of `ulimit -n` if that is less.
    """

    def __init__(self, shards: Sequence[FileStamp], max_open_files: int | None, *, scattered: bool) -> None:
        super().__init__()
        if max_open_files is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            max_open_files = MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, limit // 4)
        self.max_descriptors = max(1, max_open_files)
        self._shards = shards
        self._scattered = scattered
        self._verified: dict[int, Identity] = {}  # by number of a file, also for closed files
        self._lock = ForkSafeLock()

    def __missing__(self, number: int) -> LocalFile:
        with self._lock.lock:
            if number in self:  # another thread has opened it
                return self[number]
            self._make_room()
            file = LocalFile(self._shards[number], self._verified.get(number), self._scattered)
            self._verified[number] = file.identity
            self[number] = file
            return file

    def mapped(self, number: int) -> LocalFile:
        """Return an open file, mapped if its file system allows. A mapped file has two descriptors, because `mmap` adds one."""
        file = self[number]
        if not file.address:
            with self._lock.lock:
                self._make_room(file)
                file.map()
        return file

    def check(self, numbers: Iterable[int]) -> None:
        """Check that files are still the files that were indexed."""
        for number in numbers:
            if (file := self.get(number)) is not None:  # `_make_room` has checked the files that it dropped
                file.check_unchanged()

    def _make_room(self, keep: LocalFile | None = None) -> None:
        """Make room for one more descriptor: check and drop the files that were opened first, but never `keep`."""
        in_use = len(self) + sum(1 for file in self.values() if file.address)
        for number, file in list(self.items()):
            if in_use < self.max_descriptors:
                return
            if file is not keep:
                file.check_unchanged()  # the batch that is being read may have tokens of this file
                del self[number]
                in_use -= 2 if file.address else 1
