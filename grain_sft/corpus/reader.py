"""Reading tokens at (shard, offset): a bounded set of open files, checked against the index as they are opened.

Long pieces are read with `preadv` straight into the batch, not through `mmap`: a file that is cut short while a run maps it
kills the process (SIGBUS), where a read comes back short and can be explained, and on network file systems one read is
one request instead of one per page fault.

Batches of several pieces of at most 64 KiB are copied from a map: a read costs a microsecond and more whatever its size,
and of what is in the page cache the kernel copies a third slower. The size of every file is looked at before each such
batch, so that a file that was cut short is an error here too, but for the microseconds between the look and the copy.

What is not in the page cache is better read: a map waits for each of its pages by itself, and holds the GIL meanwhile. So
after a copy that waited for the disk the next batches are read, and then a copy is tried again.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import resource
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy.typing as npt

from grain_sft.corpus.remote import Piece, RemoteShards
from grain_sft.corpus.remote_options import RemoteOptions
from grain_sft.corpus.stored import StoredFile, read_digest, replaced, size_change
from grain_sft.errors import CorpusFileError
from grain_sft.forks import renew_lock

DEFAULT_MAX_OPEN_FILES = 1024

_MANY_PIECES = 4  # of a gather
_SMALL_PIECE = 1 << 16  # bytes, on average
_READ_INSTEAD = 1 << 8  # batches, after a copy from a map that waited for the disk
_LET_GO = 1 << 12  # gathers after which the pages that a map has touched are let go of


_Stamp = tuple[int, int, int]


def _stamp(status: os.stat_result) -> _Stamp:
    """What changes where a file is replaced or written to: device, inode and time of the last change."""
    return status.st_dev, status.st_ino, status.st_mtime_ns


class _LocalFile:
    """An open file that closes itself when the last reader lets go of it."""

    def __init__(self, shard: StoredFile, verified: _Stamp | None, scattered: bool) -> None:
        self.shard = shard
        self.fd = -1
        try:
            self.fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            if scattered and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_RANDOM)
            status = os.fstat(self.fd)
            found, self.stamp = status.st_size, _stamp(status)
            other = found == shard.size and self.stamp != verified and read_digest(self.fd, shard) != shard.digest
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be opened ({error.strerror}). Check the mount, or map the path with path_remap."
            ) from error
        if found != shard.size:
            raise CorpusFileError(size_change(shard, found))
        if other:
            raise CorpusFileError(replaced(shard))
        self.values: npt.NDArray[Any] | None = None  # the map as an array, by who wants one
        self._map: mmap.mmap | None = None
        self._gathers = 0

    @property
    def mapped(self) -> bool:
        """Whether the file has a map, and so a second descriptor."""
        return self._map is not None

    def view(self) -> memoryview:
        """All bytes of the file, mapped; only while it has the size that was indexed. The map holds a second
        descriptor of the file."""
        if self._map is None:
            self._map = mmap.mmap(self.fd, 0, mmap.MAP_SHARED, mmap.PROT_READ)
            with contextlib.suppress(OSError):
                self._map.madvise(
                    mmap.MADV_RANDOM
                )  # else a page that has to come from the disk brings megabytes with it
        self.look()
        return memoryview(self._map)

    def look(self) -> None:
        """See, before the map is copied from, that the file has the size that was indexed and, where it was written to since
        it was last looked at, both ends too."""
        status = os.fstat(self.fd)
        size = status.st_size
        if status.st_mtime_ns != self.stamp[2]:
            if size == self.shard.size and read_digest(self.fd, self.shard) != self.shard.digest:
                raise CorpusFileError(replaced(self.shard))
            self.stamp = _stamp(status)
        if size != self.shard.size:
            raise CorpusFileError(
                f"{self.shard.path}: the file has {size} bytes, expected {self.shard.size}: it was "
                f"{'cut short' if size < self.shard.size else 'appended to'} while in use."
            )
        self._gathers += 1
        if self._map is not None and not self._gathers % _LET_GO:
            # What was touched stays in the page cache; without, all of the file would become resident.
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_DONTNEED)

    def read_rest(self, offset: int, out: memoryview, done: int) -> None:
        """Fill `out` from the file's byte `offset` on, its first `done` bytes being there already."""
        while done < len(out):
            try:
                count = os.preadv(self.fd, (out[done:],), offset + done)
            except OSError as error:
                raise CorpusFileError(
                    f"{self.shard.path}: can't be read at byte {offset + done} ({error.strerror})."
                ) from error
            if not count:
                raise CorpusFileError(
                    f"{self.shard.path}: the file has {os.fstat(self.fd).st_size} bytes, expected {self.shard.size}: "
                    "it was cut short while in use."
                )
            done += count

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class ShardReader:
    """Reads values of a set of files: a corpus's tokens, or what is aligned to them. Safe in threads; at most
    `max_open_files` files stay open: the oldest makes room. A file that another thread is reading from stays open
    until that read is done.

    Args:
      shards: the files.
      itemsize: bytes of a value, such as a token.
      max_open_files: None means 1024, or a quarter of the process's limit (`ulimit -n`) where that is less.
      scattered: what is read is far apart, and once: the system reads nothing ahead, and nothing is mapped.
      remote: how remote files are read; None: as the environment says.
    """

    def __init__(
        self,
        shards: Sequence[StoredFile],
        itemsize: int,
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        if max_open_files is None:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            quarter = DEFAULT_MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft // 4
            max_open_files = max(1, min(DEFAULT_MAX_OPEN_FILES, quarter))
        self._shards = shards
        self._remote = RemoteShards(shards, itemsize, remote)
        self._itemsize = itemsize
        self._scattered = scattered
        self._max_open_files = max(1, max_open_files)
        self._open: dict[int, _LocalFile] = {}  # in the order in which they were opened
        self._verified: dict[int, _Stamp] = {}
        self._lock = threading.Lock()
        renew_lock(self)
        self._left_to_read = 0  # batches
        self._thread = threading.local()

    def gather(
        self, shards: list[int], starts: list[int], places: list[int], sizes: list[int], out: memoryview
    ) -> None:
        """Fill the bytes `out[place : place + size]` with tokens of a shard from token `start` on, for each of the four.

        Raises:
          CorpusFileError: the file is missing, unreadable, or not the one that was indexed.
        """
        opened, itemsize, preadv = self._open, self._itemsize, os.preadv
        pieces: Iterable[Piece] = zip(shards, starts, places, sizes, strict=True)
        if self._remote:
            pieces = self._remote.gather(list(pieces), out)
        elif len(sizes) >= _MANY_PIECES and sum(sizes) <= len(sizes) * _SMALL_PIECE:
            distinct = set(shards)
            if self._may_map(distinct):
                self._copy(pieces, distinct, out)
                self._after_copy()
                return
        for shard, start, place, size in pieces:
            file = opened.get(shard) or self._open_file(shard)
            offset = file.shard.data_offset + start * itemsize
            piece = out[place : place + size]
            try:
                done = preadv(file.fd, (piece,), offset)
            except OSError:
                done = 0  # read_rest says what it is
            if done != size:
                file.read_rest(offset, piece, done)

    def _may_map(self, shards: set[int]) -> bool:
        """Whether these files may be copied from maps now; call `_after_copy` after that."""
        if (
            self._remote or self._scattered or 2 * len(shards) > self._max_open_files
        ):  # a mapped file has two descriptors
            return False
        if self._left_to_read:
            self._left_to_read -= 1
            return False
        if not hasattr(self._thread, "waits"):
            self._thread.waits = _disk_waits()
        return True

    def _after_copy(self) -> None:
        waits = _disk_waits()
        if waits != self._thread.waits:
            self._thread.waits, self._left_to_read = waits, _READ_INSTEAD

    def _copy(self, pieces: Iterable[Piece], shards: set[int], out: memoryview) -> None:
        """Copy pieces from maps of their files."""
        views: dict[int, tuple[memoryview, int]] = {}
        for shard in shards:
            file = self._open.get(shard) or self._open_file(shard)
            if not file.mapped:
                with self._lock:
                    self._make_room(1, file)
            views[shard] = file.view(), file.shard.data_offset
        itemsize = self._itemsize
        if len(views) == 1:
            ((view, base),) = views.values()
            for _, start, place, size in pieces:
                offset = base + start * itemsize
                out[place : place + size] = view[offset : offset + size]
            return
        for shard, start, place, size in pieces:
            view, base = views[shard]
            offset = base + start * itemsize
            out[place : place + size] = view[offset : offset + size]

    def _open_file(self, shard: int) -> _LocalFile:
        """Open a shard in place of the one that has been open longest."""
        with self._lock:
            found = self._open.get(shard)
            if found is not None:
                return found
            self._make_room(1)
            entry = self._shards[shard]
            opened = _LocalFile(entry, self._verified.get(shard), self._scattered)
            self._verified[shard] = opened.stamp
            self._open[shard] = opened
            return opened

    def _make_room(self, descriptors: int, keep: _LocalFile | None = None) -> None:
        """Let go of the files that have been open longest, until so many more descriptors may be opened."""
        held = len(self._open) + sum(file.mapped for file in self._open.values())
        for shard, file in list(self._open.items()):
            if held + descriptors <= self._max_open_files:
                return
            if file is not keep:
                del self._open[shard]
                held -= 1 + file.mapped


def _disk_waits() -> int:
    """Page faults of this thread, so far, that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
