"""Shard cache: blocks of remote files on the local disk, for all processes of the machine. The files are its only state.

The process that gets the lock of a block's file fetches the block. Others wait for it while it makes progress.
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import get_ident
from typing import NamedTuple, TypeVar

from absl import logging

from grain_sft.storage import activity
from grain_sft.storage.cache_blocks import BLOCKS, PART, Block, DamagedBlockError, Space, claim
from grain_sft.storage.locks import HeldLock
from grain_sft.storage.regular_files import open_regular
from grain_sft.storage.remote.files import PART_BYTES, RemotePiece, fetch_exactly, read_pieces
from grain_sft.storage.remote.options import CacheOptions
from grain_sft.storage.remote.requests import Range
from grain_sft.storage.remote.retries import Limits

BATCH_BYTES = 64 << 20  # in memory at once
_BATCH_BLOCKS = 64  # made at once, each with an open file
_POLL, _LONGEST_POLL = 0.002, 0.05  # seconds

T = TypeVar("T")
Jobs = Mapping[Block, list[RemotePiece]]
"""Blocks, each with the pieces of it that are read."""


class ShardCache:
    """Reader of remote files that keeps their blocks in a folder. Safe in threads and processes.

    Without a writable folder, or without room on the disk or beside the unfinished blocks, bytes come from the bucket itself.
    """

    def __init__(self, options: CacheOptions, limits: Limits) -> None:
        self._folder, self._unit = os.path.join(options.folder, BLOCKS), options.unit and int(options.unit)
        self._limits, self._space, self._warned = limits, Space(self._folder, int(options.max_bytes)), False

    def read(self, pieces: Sequence[RemotePiece], out: memoryview) -> None:
        """Copy all pieces to `out`."""
        jobs = self._jobs(pieces)
        pending = {block: wanted for block, wanted in jobs.items() if not self._serve(block, wanted, out)}
        activity.count("shard_cache_hits", len(jobs) - len(pending))
        activity.count("shard_cache_misses", len(pending))
        pause, since = _POLL, time.monotonic()
        while pending:
            others: dict[Block, list[RemotePiece]] = {}
            for batch in batches(pending.items(), lambda job: job[0].size):
                others |= self._make(dict(batch), out)
            if len(others) < len(pending):
                pause, since = _POLL, time.monotonic()
            elif time.monotonic() - max(since, *map(self._last_progress, others)) > self._limits.seconds:
                self._read_bucket(others.values(), out)  # the processes that fetch them have stalled
                return
            pending = others
            if pending:
                block = next(iter(pending))
                maker = _Maker(self._path(block) + PART)
                activity.doing[get_ident()] = activity.AWAITING_BLOCK, block.start, block.stop, block.file.path, maker
                time.sleep(pause)
                pause = min(_LONGEST_POLL, 2 * pause)

    def _jobs(self, pieces: Sequence[RemotePiece]) -> Jobs:
        jobs: dict[Block, list[RemotePiece]] = {}
        for file, offset, place, size in pieces:
            unit = self._unit or max(1, file.size)
            for start in range(offset // unit * unit, offset + size, unit):
                first, last = max(offset, start), min(offset + size, start + unit)
                block = Block(file, start, min(file.size, start + unit))
                jobs.setdefault(block, []).append(RemotePiece(file, first, place + first - offset, last - first))
        return jobs

    def _path(self, block: Block) -> str:
        return block.path(self._folder)

    def _serve(self, block: Block, wanted: Sequence[RemotePiece], out: memoryview) -> bool:
        """Copy pieces of a block from its file; return False where the file is missing or damaged."""
        path = self._path(block)
        try:
            fd = open_regular(path)
        except OSError:
            return False
        try:
            block.read(fd, wanted, out)
            with contextlib.suppress(OSError):  # of a read-only folder
                os.utime(path)
            return True
        except (DamagedBlockError, OSError) as error:
            logging.warning("%s: damaged (%s); fetching it again.", path, error)
            with contextlib.suppress(OSError):
                self._space.remove(path, fd)
            return False
        finally:
            os.close(fd)

    def _make(self, jobs: Jobs, out: memoryview) -> Jobs:
        """Fetch and keep the blocks that no other process fetches, and copy their pieces. Return the other blocks."""
        reserved: dict[Block, int] = {}
        others, uncached = {}, []
        with contextlib.ExitStack() as claimed:
            for block, wanted in jobs.items():
                path = self._path(block)
                if self._serve(block, wanted, out):  # made meanwhile
                    continue
                try:
                    lock = claim(path)
                    if lock is not None:
                        claimed.callback(self._release, path + PART, lock)
                    if lock is None or os.path.exists(path):
                        others[block] = wanted
                    elif self._space.reserve(lock.fd, block.file_size):
                        reserved[block] = lock.fd
                    else:
                        uncached.append(wanted)
                except OSError as error:
                    self._warn(error)
                    uncached.append(wanted)
            failed = self._fill(reserved)
            for block, fd in reserved.items():
                try:
                    if block not in failed:
                        block.finish(fd)
                        self._space.publish(self._path(block))
                        block.read(fd, jobs[block], out)
                        continue
                except (OSError, DamagedBlockError) as error:
                    self._warn(error)
                uncached.append(jobs[block])
        self._read_bucket(uncached, out)
        return others

    def _release(self, part: str, lock: HeldLock) -> None:
        with lock, contextlib.suppress(OSError):
            self._space.remove(part, lock.fd)  # a published block has no such file

    def _fill(self, reserved: Mapping[Block, int]) -> set[Block]:
        """Fetch blocks into their open files; return those that could not be written."""
        parts = [
            (block, Range(block.file.path, start, min(block.stop, start + PART_BYTES), block.file.version))
            for block in reserved
            for start in range(block.start, block.stop, PART_BYTES)
        ]
        failed = set()
        for group in batches(parts, lambda part: part[1].stop - part[1].start):
            first = group[0][0]
            activity.doing[get_ident()] = activity.DOWNLOADING, len(group), first.start, first.stop, first.file.path
            bodies = fetch_exactly([wanted for _, wanted in group], self._limits)
            activity.count("shard_cache_fetched_bytes", sum(map(len, bodies)))
            for (block, wanted), body in zip(group, bodies, strict=True):
                try:
                    block.write(reserved[block], wanted.start, body)
                except OSError as error:
                    self._warn(error)
                    failed.add(block)
        return failed

    def _read_bucket(self, wanted: Iterable[Sequence[RemotePiece]], out: memoryview) -> None:
        read_pieces([piece for pieces in wanted for piece in pieces], out, self._limits)

    def _last_progress(self, block: Block) -> float:
        """Return the time on the monotonic clock at which the process that fetches the block last wrote to its file."""
        try:
            age = time.time() - os.stat(self._path(block) + PART).st_mtime
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


class _Maker(NamedTuple):
    """Description of the process that holds the lock of a file, computed when it is printed."""

    path: str

    def __str__(self) -> str:
        try:
            inode = str(os.stat(self.path).st_ino)
            with open("/proc/locks") as locks:
                fields = [line.split() for line in locks]
        except OSError:
            return "another process"
        makers = (each[4] for each in fields if "FLOCK" in each and "->" not in each and each[5].endswith(f":{inode}"))
        return next((f"process {pid}" for pid in makers), "another process")


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of items that fit into memory, and whose files may be open at once."""
    batch: list[T] = []
    size = 0
    for item in items:
        if batch and (size + size_of(item) > BATCH_BYTES or len(batch) == _BATCH_BLOCKS):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += size_of(item)
    if batch:
        yield batch
