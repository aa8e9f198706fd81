"""Chunks: where the chunks of a preparation are kept, by unit."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from grain_sft.errors import StorageError
from grain_sft.prepare import chunk
from grain_sft.storage import files

REMOTE_THREADS = 16
REMOTE_FILES = 8  # whole chunks that are in memory

T = TypeVar("T")


class Chunks:
    """The folder of chunk files, local or remote.

    Attributes:
      remote: whether it is in a bucket.
    """

    def __init__(self, folder: str, key: str) -> None:
        self._folder = folder
        self._key = key
        self.remote = files.is_remote(folder)

    def path(self, unit: int) -> str:
        """Of a unit's chunk."""
        return files.join(self._folder, f"unit-{unit:06d}.chunk")

    def write(self, unit: int, data: bytes) -> None:
        """Keep a unit's chunk.

        Raises:
          StorageError: no space, or no permission.
        """
        files.write_bytes(self.path(unit), data)

    def header(self, unit: int) -> chunk.Header | None:
        """What a unit's chunk holds; None where there is none yet, or one of another preparation."""
        path = self.path(unit)
        if not files.exists(path):
            return None
        size = chunk.prefix_size(files.read_range(path, 0, 16), path)
        header = chunk.decode_header(files.read_range(path, 0, size), files.size(path), path)
        return header if header.key == self._key else None

    def records(self, unit: int, header: chunk.Header) -> npt.NDArray[Any]:
        """The records of a chunk [records], dtype `chunk.RECORD`."""
        return np.frombuffer(files.read_range(self.path(unit), header.size, header.tokens_at), chunk.RECORD)

    def all_headers(self, units: int) -> list[chunk.Header | None]:
        """What the chunks of units 0 to `units` hold."""
        return list(self._each(self.header, range(units), REMOTE_THREADS))

    def complete_headers(self, units: int) -> list[chunk.Header]:
        """The same, when all of them have been made.

        Raises:
          StorageError: a chunk is missing.
        """
        headers = self.all_headers(units)
        found = [header for header in headers if header is not None]
        if len(found) < units:
            raise StorageError(f"{self.path(headers.index(None))}: is not there any more. Prepare again.")
        return found

    def all_records(self, headers: Sequence[chunk.Header]) -> Iterator[npt.NDArray[Any]]:
        """The records of every chunk, in order."""
        return self._each(lambda unit: self.records(unit, headers[unit]), range(len(headers)), REMOTE_THREADS)

    def contents(self, units: Sequence[int]) -> Iterator[bytes]:
        """The whole files of chunks, in order."""
        return self._each(lambda unit: files.read_bytes(self.path(unit)), units, REMOTE_FILES)

    def _each(self, read: Callable[[int], T], units: Sequence[int], at_once: int) -> Iterator[T]:
        """`read` of each unit, in order; of chunks in a bucket some at once, since every one takes a round trip."""
        if not self.remote:
            yield from map(read, units)
            return
        with concurrent.futures.ThreadPoolExecutor(at_once) as threads:
            for start in range(0, len(units), at_once):
                yield from threads.map(read, units[start : start + at_once])
