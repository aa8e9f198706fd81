"""Shard cache: copies of blocks of remote files on the local disk, for all processes of the machine.

A block is a range of bytes of a remote file, or the whole file. The process that locks the file of a block fetches the block.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import get_ident
from typing import TypeVar

from absl import logging

from grain_sft.storage import activity
from grain_sft.storage.cache_blocks import BLOCKS, PART, Block, DamagedBlockError, Space, claim, file_size
from grain_sft.storage.locks import HeldLock
from grain_sft.storage.regular_files import open_regular
from grain_sft.storage.remote.files import PART_BYTES, RemotePiece, fetch_exactly, read_pieces
from grain_sft.storage.remote.responses import Range
from grain_sft.storage.remote.retries import Limits
from grain_sft.storage.remote_options import CacheOptions

BATCH_BYTES = 64 << 20  # most bytes that are fetched together, and in memory at once
_BATCH_BLOCKS = 64  # most blocks that are fetched together, and whose files are open at once
_POLL = 0.01  # seconds between two checks of blocks that other processes fetch

T = TypeVar("T")
PiecesOf = Mapping[Block, list[RemotePiece]]


class ShardCache:
    """Reader of remote files that stores their blocks in a folder. Several threads and processes may use it at once.

    If a block can't be stored, because the folder is full or read-only, only the requested bytes are read, from the bucket. A
    reader waits for blocks that other processes fetch. If none of their files grows for `limits.seconds`, it reads the bucket.
    """

    def __init__(self, options: CacheOptions, limits: Limits) -> None:
        self._folder = os.path.join(options.folder, BLOCKS)
        self._block_bytes = options.unit and int(options.unit)  # None if a block is a whole file
        self._limits = limits
        self._space = Space(self._folder, int(options.max_bytes))
        self._has_warned = False

    def read(self, pieces: Sequence[RemotePiece], out: memoryview) -> None:
        """Copy all pieces to `out`."""
        pieces_of = self._by_block(pieces)
        missing = {block: wanted for block, wanted in pieces_of.items() if not self._read_cached(block, wanted, out)}
        activity.count("shard_cache_hits", len(pieces_of) - len(missing))
        activity.count("shard_cache_misses", len(missing))
        last_progress = time.monotonic()  # when this call began, got a block, or last found that a file was written to
        last_written: list[int] = []
        while missing:
            awaited: dict[Block, list[RemotePiece]] = {}  # fetched by other processes
            for batch in batches(missing.items(), lambda item: item[0].size):
                awaited |= self._fetch(dict(batch), out)
            if not awaited:
                return
            # times of files are only compared with each other, because the machine's clock may be set back
            if (written := list(map(self._last_written, awaited))) != last_written:
                last_progress, last_written = time.monotonic(), written
            if time.monotonic() - last_progress > self._limits.seconds:
                self._read_bucket(awaited.values(), out)
                return
            block = next(iter(awaited))
            # a function and its arguments: it is called only if the watchdog asks what this thread does
            activity.doing[get_ident()] = _describe_wait, block, block.path(self._folder) + PART
            time.sleep(_POLL)
            missing = awaited

    def _by_block(self, pieces: Sequence[RemotePiece]) -> PiecesOf:
        """Cut `pieces` where blocks of their files end, and return the parts of each block."""
        pieces_of: dict[Block, list[RemotePiece]] = {}
        for file, offset, place, size in pieces:  # `place` is an index into the bytes that are read
            block_bytes = self._block_bytes or max(1, file.size)
            first_block = offset // block_bytes * block_bytes
            for block_start in range(first_block, offset + size, block_bytes):
                block = Block(file, block_start, min(file.size, block_start + block_bytes))
                start, stop = max(offset, block_start), min(offset + size, block_start + block_bytes)
                part = RemotePiece(file, start, place + start - offset, stop - start)
                pieces_of.setdefault(block, []).append(part)
        return pieces_of

    def _read_cached(self, block: Block, pieces: Sequence[RemotePiece], out: memoryview) -> bool:
        """Copy pieces of a block from its file. Return False if the file is missing or damaged. Remove a damaged file."""
        path = block.path(self._folder)
        try:
            fd = open_regular(path)
        except OSError:
            return False
        try:
            block.read(fd, pieces, out)
            with contextlib.suppress(OSError):  # the folder may be read-only
                os.utime(path)  # `Space` removes the least recently used files
            return True
        except (DamagedBlockError, OSError) as error:
            logging.warning("%s: damaged (%s); fetching it again.", path, error)
            with contextlib.suppress(OSError):
                self._space.remove(path, fd)
            return False
        finally:
            os.close(fd)

    def _fetch(self, pieces_of: PiecesOf, out: memoryview) -> PiecesOf:
        """Copy pieces of blocks to `out`. Fetch blocks that the cache lacks, and keep them if it has room.

        Return the pieces of blocks that other processes are fetching, without copying them.
        """
        reserved: dict[Block, int] = {}  # blocks to keep, with the descriptors of their files
        # `awaited` are pieces of blocks that other processes fetch. `uncached` are pieces of blocks that can't be kept.
        awaited, uncached = {}, []
        with contextlib.ExitStack() as claims:
            for block, pieces in pieces_of.items():
                path = block.path(self._folder)
                if self._read_cached(block, pieces, out):  # without a lock, so that processes that waited read concurrently
                    continue
                try:
                    lock = claim(path)
                    if lock is None:
                        awaited[block] = pieces
                        continue
                    claims.callback(self._release, path + PART, lock)
                    if self._read_cached(block, pieces, out):  # another process finished it just before `claim`
                        continue
                    if self._space.reserve(lock.fd, file_size(block.size)):
                        reserved[block] = lock.fd
                    else:
                        uncached.append(pieces)
                except OSError as error:
                    self._warn(error)
                    uncached.append(pieces)
            unwritten = self._download(reserved)
            for block, fd in reserved.items():
                if block in unwritten or not self._keep(block, fd, pieces_of[block], out):
                    uncached.append(pieces_of[block])
        self._read_bucket(uncached, out)
        return awaited

    def _release(self, part: str, lock: HeldLock) -> None:
        """Free the lock of the unfinished file `part`, and remove the file if `publish` has not renamed it."""
        with lock, contextlib.suppress(OSError):
            self._space.remove(part, lock.fd)

    def _download(self, reserved: Mapping[Block, int]) -> set[Block]:
        """Fetch blocks into their open files. Return the blocks whose files could not be written."""
        ranges = {block: Range(block.file.path, block.start, block.stop, block.file.version) for block in reserved}
        parts = [(block, part) for block, whole in ranges.items() for part in whole.cut(PART_BYTES)]
        unwritten = set()
        for batch in batches(parts, lambda part: part[1].stop - part[1].start):
            first = batch[0][0]
            activity.doing[get_ident()] = activity.DOWNLOADING, len(batch), first.start, first.stop, first.file.path
            bodies = fetch_exactly([part for _, part in batch], self._limits)
            activity.count("shard_cache_fetched_bytes", sum(map(len, bodies)))
            for (block, part), body in zip(batch, bodies, strict=True):
                try:
                    block.write(reserved[block], part.start, body)
                except OSError as error:
                    self._warn(error)
                    unwritten.add(block)
        return unwritten

    def _keep(self, block: Block, fd: int, pieces: Sequence[RemotePiece], out: memoryview) -> bool:
        """Finish the file of a fetched block, and copy pieces from it. Return whether this succeeded."""
        try:
            block.finish(fd)
            self._space.publish(block.path(self._folder))
            block.read(fd, pieces, out)
            return True
        except (OSError, DamagedBlockError) as error:
            self._warn(error)
            return False

    def _read_bucket(self, groups: Iterable[Sequence[RemotePiece]], out: memoryview) -> None:
        read_pieces([piece for pieces in groups for piece in pieces], out, self._limits)

    def _last_written(self, block: Block) -> int:
        """Return the time of the last write to the block's unfinished file, in ns; 0 without such a file."""
        try:
            return os.stat(block.path(self._folder) + PART).st_mtime_ns
        except OSError:
            return 0

    def _warn(self, error: Exception) -> None:
        """Log the first failure to write to the cache."""
        if not self._has_warned:
            self._has_warned = True
            text = "The shard cache %s can't be written to (%s). Blocks that it lacks are read from the bucket."
            logging.warning(text, self._folder, getattr(error, "strerror", None) or error)


def _describe_wait(block: Block, part: str) -> str:
    """Describe a wait for a block. Name the process that fetches it, if /proc/locks lists the lock of its file `part`."""
    holder = "another process"
    with contextlib.suppress(OSError):
        inode = os.stat(part).st_ino
        # a line of process 1234 and inode 5678: `1: FLOCK ADVISORY WRITE 1234 08:01:5678 0 EOF`
        if found := re.search(rf": FLOCK .* (\d+) \w+:\w+:{inode} ", Path("/proc/locks").read_text()):
            holder = f"process {found[1]}"
    return activity.AWAITING_BLOCK(block.start, block.stop, block.file.path, holder)


def batches(items: Iterable[T], size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield groups of at most `_BATCH_BLOCKS` items and `BATCH_BYTES` bytes. An item with more bytes is a group alone."""
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
