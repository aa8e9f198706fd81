"""Content hashes: SHA-256 over the SHA-256 of each 4 MiB, so that several threads hash one file (about 1 GB/s a core)."""

import concurrent.futures
import hashlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from grain_sft.storage.regular_files import pread

BLOCK = 1 << 22
"""Bytes that are hashed together."""

THREADS = min(8, os.cpu_count() or 1)

_PARALLEL_FROM = 4 * BLOCK  # bytes; fewer are hashed before threads could start


def joined(blocks: Iterable[bytes], start: bytes = b"") -> str:
    """Return the hash, in hexadecimal digits, of `start` and the hashes of blocks."""
    return hashlib.sha256(start + b"".join(blocks)).hexdigest()


def of_block(data: Any) -> bytes:
    """Return the hash of a block, a buffer."""
    return hashlib.sha256(data).digest()


def of_bytes(data: bytes | memoryview) -> str:
    """Return the hash of a whole file's data."""
    view = memoryview(data).cast("B")
    return joined(of_block(view[start : start + BLOCK]) for start in range(0, len(view), BLOCK))


def blocks_of(ranges: Sequence[tuple[int, int, int]]) -> list[bytes]:
    """Return the hashes of the blocks of each range, a descriptor and the bytes [start, stop), or raise OSError or EOFError."""
    parts = [(fd, at, min(at + BLOCK, stop)) for fd, start, stop in ranges for at in range(start, stop, BLOCK)]
    if sum(stop - at for _, at, stop in parts) < _PARALLEL_FROM:
        return [_of_part(part) for part in parts]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(_of_part, parts))


def _of_part(part: tuple[int, int, int]) -> bytes:
    fd, at, stop = part
    data = pread(fd, stop - at, at)
    if len(data) < stop - at:
        raise EOFError(f"it ends at byte {at + len(data)}")
    return of_block(data)


class BlockHasher:
    """Context that hashes blocks in threads while the caller works on them: `add` each block of each file, in order."""

    def __init__(self, files: int) -> None:
        self._blocks: list[list[concurrent.futures.Future[bytes]]] = [[] for _ in range(files)]
        self._waiting: deque[concurrent.futures.Future[bytes]] = deque()
        self._pool = concurrent.futures.ThreadPoolExecutor(THREADS)

    def add(self, file: int, data: Any) -> None:
        """Hash the next block of file number `file`, a buffer that does not change."""
        if len(self._waiting) > THREADS:  # bounds the memory
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(of_block, data))
        self._blocks[file].append(self._waiting[-1])

    def joined(self, file: int) -> str:
        """Return the hash of file number `file`, whose blocks were all added."""
        return joined(block.result() for block in self._blocks[file])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
