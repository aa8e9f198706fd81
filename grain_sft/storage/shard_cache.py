"""Shard cache: blocks of remote files on the local disk, for all processes of the machine.

It keeps no state but its files, so that it needs no server and survives whatever ends a process. A block is fetched by
the process that gets the lock of its file; others wait for it, as long as it makes progress. Where the folder can't be
written to, the disk is full, or unfinished blocks take all the room, what is wanted is read from the bucket itself.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from threading import get_ident
from typing import NamedTuple, TypeVar

from absl import logging

from grain_sft.storage import activity
from grain_sft.storage.cache_blocks import BLOCKS, PART, Block, DamagedBlockError, Space, Wanted, claim
from grain_sft.storage.regular_files import open_regular
from grain_sft.storage.remote import files as remote_files
from grain_sft.storage.remote.options import CacheOptions
from grain_sft.storage.remote.requests import Range
from grain_sft.storage.remote.retries import Limits

_BATCH_BYTES = 64 << 20  # fetched at once, and so held in memory
_BATCH_BLOCKS = 64  # made at once, each with an open file
_POLL, _LONGEST_POLL = 0.002, 0.05  # seconds

T = TypeVar("T")


class CachedFile(NamedTuple):
    """One version of a remote file.

    Attributes:
      path: URL.
      size: Number of bytes.
      key: Hash of URL, size, digest and version.
      version: Version of the file, where its file system has any; bytes of no other one are kept.
    """

    path: str
    size: int
    key: str
    version: str | None


class CachePiece(NamedTuple):
    """`size` bytes of a file from byte `offset` on, and their offset in the output."""

    file: CachedFile
    offset: int
    place: int
    size: int


class _Job(NamedTuple):
    """A block that is needed, its file, and the parts of it that are wanted."""

    block: Block
    file: CachedFile
    wanted: list[Wanted]


class ShardCache:
    """Reads remote files by way of a folder. Safe in threads and processes.

    Args:
      options: Folder, bound and unit.
      limits: Limits of the requests.
    """

    def __init__(self, options: CacheOptions, limits: Limits) -> None:
        self._folder, self._unit = os.path.join(options.folder, BLOCKS), options.unit
        self._limits = limits
        self._space = Space(self._folder, options.max_bytes)
        self._warned = False

    def read(self, pieces: Sequence[CachePiece], out: memoryview) -> None:
        """Copy all pieces to `out`.

        Raises:
          CorpusFileError: A file is missing, was replaced, or kept failing until its time was up.
        """
        jobs = self._jobs(pieces)
        pending = [job for job in jobs if not self._serve(job, out)]
        activity.count(shard_cache_hits=len(jobs) - len(pending), shard_cache_misses=len(pending))
        pause, since = _POLL, time.monotonic()
        while pending:
            held = [job for batch in _batches(pending, lambda job: job.block.size) for job in self._make(batch, out)]
            if len(held) < len(pending):
                pause, since = _POLL, time.monotonic()
            elif time.monotonic() - max(since, *(self._last_progress(job) for job in held)) > self._limits.seconds:
                self._read_bucket(held, out)  # their makers are stopped
                return
            pending = held
            if pending:
                block, file, _ = pending[0]
                maker = _Holder(block.path(self._folder) + PART)
                activity.doing[get_ident()] = activity.AWAITING_BLOCK, block.start, block.stop, file.path, maker
                time.sleep(pause)
                pause = min(_LONGEST_POLL, 2 * pause)

    def _jobs(self, pieces: Sequence[CachePiece]) -> list[_Job]:
        jobs: dict[Block, _Job] = {}
        for file, offset, place, size in pieces:
            unit = self._unit or max(1, file.size)
            for start in range(offset // unit * unit, offset + size, unit):
                block = Block(file.key, start, min(file.size, start + unit))
                job = jobs.setdefault(block, _Job(block, file, []))
                first, last = max(offset, start), min(offset + size, start + unit)
                job.wanted.append(Wanted(first - start, place + first - offset, last - first))
        return list(jobs.values())

    def _serve(self, job: _Job, out: memoryview) -> bool:
        """Copy what is wanted of a block from its file; return False where there is none, or a damaged one."""
        path = job.block.path(self._folder)
        try:
            fd = open_regular(path)
        except OSError:
            return False
        try:
            job.block.read(fd, job.wanted, out)
            with contextlib.suppress(OSError):  # of a folder that may only be read
                os.utime(path)
            return True
        except (DamagedBlockError, OSError) as error:
            logging.warning("%s: damaged (%s); fetching it again.", path, error)
            with contextlib.suppress(OSError):
                self._space.remove(path, fd)
            return False
        finally:
            os.close(fd)

    def _make(self, jobs: Sequence[_Job], out: memoryview) -> list[_Job]:
        """Fetch and keep the blocks that no other process fetches, and copy what is wanted of them; return the others."""
        mine: list[tuple[_Job, int]] = []
        held: list[_Job] = []
        straight: list[_Job] = []
        try:
            for job in jobs:
                if self._serve(job, out):  # made meanwhile
                    continue
                try:
                    fd = claim(job.block.path(self._folder))
                    if fd is None:
                        held.append(job)
                    elif self._reserve(job, fd):
                        mine.append((job, fd))
                    elif not self._serve(job, out):
                        straight.append(job)
                except OSError as error:
                    self._warn(error)
                    straight.append(job)
            failed = self._fill(mine)
            for job, fd in mine:
                try:
                    if job not in failed:
                        job.block.finish(fd)
                        self._space.publish(job.block.path(self._folder))
                        job.block.read(fd, job.wanted, out)
                        continue
                except (OSError, DamagedBlockError) as error:
                    self._warn(error)
                straight.append(job)
        finally:
            for job, fd in mine:
                with contextlib.suppress(OSError):  # what was finished has no such name
                    self._space.remove(job.block.path(self._folder) + PART, fd)
                os.close(fd)
        self._read_bucket(straight, out)
        return held

    def _reserve(self, job: _Job, fd: int) -> bool:
        """Reserve room for the claimed file `fd`; if another process was faster or there is no room, remove and close it."""
        path = job.block.path(self._folder)
        reserved = False
        try:
            reserved = not os.path.exists(path) and self._space.reserve(fd, job.block.file_size)
            return reserved
        finally:
            if not reserved:
                with contextlib.suppress(OSError):
                    self._space.remove(path + PART, fd)
                os.close(fd)

    def _fill(self, jobs: Sequence[tuple[_Job, int]]) -> list[_Job]:
        """Fetch blocks into their files; return those that could not be written."""
        parts = []
        for job, fd in jobs:
            for start in range(job.block.start, job.block.stop, remote_files.PART_BYTES):
                stop = min(job.block.stop, start + remote_files.PART_BYTES)
                parts.append((job, fd, Range(job.file.path, start, stop, version=job.file.version)))
        failed: list[_Job] = []
        for group in _batches(parts, lambda part: part[2].stop - part[2].start):
            block, file, _ = group[0][0]
            activity.doing[get_ident()] = activity.DOWNLOADING, len(group), block.start, block.stop, file.path
            bodies = remote_files.fetch_exactly([wanted for _, _, wanted in group], self._limits)
            activity.count(shard_cache_fetched_bytes=sum(map(len, bodies)))
            for (job, fd, wanted), body in zip(group, bodies, strict=True):
                try:
                    job.block.write(fd, wanted.start - job.block.start, body)
                except OSError as error:
                    self._warn(error)
                    failed.append(job)
        return failed

    def _read_bucket(self, jobs: Sequence[_Job], out: memoryview) -> None:
        """Copy what is wanted from the bucket itself."""
        ranges, places = [], []
        for job in jobs:
            for start, place, size in job.wanted:
                begin = job.block.start + start
                ranges.append(Range(job.file.path, begin, begin + size, version=job.file.version))
                places.append(place)
        if not ranges:
            return
        for place, body in zip(places, remote_files.fetch_exactly(ranges, self._limits), strict=True):
            out[place : place + len(body)] = body

    def _last_progress(self, job: _Job) -> float:
        """Return when, on the monotonic clock, the block's maker last wrote to its file."""
        try:
            age = time.time() - os.stat(job.block.path(self._folder) + PART).st_mtime
        except OSError:
            return 0.0
        return time.monotonic() - max(0.0, age)

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logging.warning(
                "The shard cache %s can't be written to (%s). What it has is used; the rest is read from the bucket.",
                self._folder,
                getattr(error, "strerror", None) or error,
            )


class _Holder(NamedTuple):
    """The process that holds the lock of a file, as the system names it when this is printed."""

    path: str

    def __str__(self) -> str:
        try:
            inode = str(os.stat(self.path).st_ino)
            with open("/proc/locks") as locks:
                fields = [line.split() for line in locks]
        except OSError:
            return "another process"
        held = (each for each in fields if "FLOCK" in each and "->" not in each and each[5].rpartition(":")[2] == inode)
        return next((f"process {each[4]}" for each in held), "another process")


def _batches(items: Sequence[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of items that fit into memory, and whose files may be open at once."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and (size + size_of(item) > _BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch
