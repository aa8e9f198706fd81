"""Reading tokens at (shard, offset): a bounded set of open files, checked against the index as they are opened.

Rows are read with `preadv` straight into the batch, not through `mmap`. From the page cache the two cost the same
within a third; but a file that is cut short while a run maps it kills the process (SIGBUS), where a read comes back
short and can be explained, and on network file systems one read is one request instead of one per page fault.
"""

from __future__ import annotations

import collections
import os
import resource
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft import files
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.index import size_change
from grain_sft.corpus.shard import Shard, read_digest
from grain_sft.errors import CorpusFileError

DEFAULT_MAX_OPEN_FILES = 256

_SCAN_BYTES = 1 << 22


class _LocalFile:
    """An open file that closes itself when the last reader lets go of it."""

    def __init__(self, shard: Shard, verify: bool) -> None:
        self._fd = -1
        try:
            self._fd = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC)
            found = os.fstat(self._fd).st_size
            if found != shard.size:
                raise CorpusFileError(size_change(shard, found))
            if verify and read_digest(self._fd, shard) != shard.digest:
                raise CorpusFileError(
                    f"{shard.path}: the file has the size that was indexed, but other tokens: it was replaced. "
                    "Restore it, or index the corpus again."
                )
        except CorpusFileError:
            raise
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be opened ({error.strerror}). Check the mount, or map the path with path_remap."
            ) from error

    def read_into(self, shard: Shard, offset: int, out: memoryview) -> None:
        try:
            done = os.preadv(self._fd, (out,), offset)
        except OSError:
            done = 0
        while done < len(out):  # a signal, or trouble
            try:
                count = os.preadv(self._fd, [out[done:]], offset + done)
            except OSError as error:
                raise CorpusFileError(
                    f"{shard.path}: can't be read at byte {offset + done} ({error.strerror})."
                ) from error
            if not count:
                raise CorpusFileError(
                    f"{shard.path}: the file ends at byte {offset + done}, expected {shard.size} bytes: "
                    "it was cut short while in use."
                )
            done += count

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class _RemoteFile:
    """A file behind fsspec; every read is one ranged request."""

    def __init__(self, shard: Shard) -> None:
        self._filesystem: Any = files.filesystem(shard.path)
        try:
            found = int(self._filesystem.info(shard.path)["size"])
        except OSError as error:
            raise CorpusFileError(f"{shard.path}: can't be opened ({error}).") from error
        if found != shard.size:
            raise CorpusFileError(size_change(shard, found))

    def read_into(self, shard: Shard, offset: int, out: memoryview) -> None:
        try:
            data = self._filesystem.cat_file(shard.path, start=offset, end=offset + len(out))
        except OSError as error:
            raise CorpusFileError(f"{shard.path}: can't be read at byte {offset} ({error}).") from error
        if len(data) != len(out):
            raise CorpusFileError(
                f"{shard.path}: asked for {len(out)} bytes at byte {offset}, got {len(data)}: it was cut short while in use."
            )
        out[:] = data


class ShardReader:
    """Reads tokens of a corpus. Safe in threads; at most `max_open_files` files stay open, the least used go first.

    Args:
      corpus: whose shards are read.
      max_open_files: None means 256, or a quarter of the process's limit (`ulimit -n`) where that is less.
    """

    def __init__(self, corpus: Corpus, max_open_files: int | None = None) -> None:
        if max_open_files is None:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            quarter = DEFAULT_MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft // 4
            max_open_files = max(1, min(DEFAULT_MAX_OPEN_FILES, quarter))
        self._shards = corpus.shards
        self._itemsize = corpus.dtype.itemsize
        self._max_open_files = max_open_files
        self._open: collections.OrderedDict[int, _LocalFile | _RemoteFile] = collections.OrderedDict()
        self._verified: set[int] = set()
        self._lock = threading.Lock()

    def gather(
        self, shards: list[int], starts: list[int], places: list[int], sizes: list[int], out: memoryview
    ) -> None:
        """Fill the bytes `out[place : place + size]` with tokens of a shard from token `start` on, for each of the four.

        Raises:
          CorpusFileError: the file is missing, unreadable, or not the one that was indexed.
        """
        lock, opened, entries, itemsize = self._lock, self._open, self._shards, self._itemsize
        for shard, start, place, size in zip(shards, starts, places, sizes, strict=True):
            with lock:  # 1 microsecond of Python a piece, beside 3 to copy 32 KiB
                file = opened.get(shard)
                if file is None:
                    file = self._open_file(shard)
                else:
                    opened.move_to_end(shard)
            entry = entries[shard]
            file.read_into(entry, entry.data_offset + start * itemsize, out[place : place + size])

    def _open_file(self, shard: int) -> _LocalFile | _RemoteFile:
        """Open a shard in place of the least recently used one. Called under the lock."""
        while len(self._open) >= self._max_open_files:
            self._open.popitem(last=False)
        entry = self._shards[shard]
        verify = shard not in self._verified
        opened = _RemoteFile(entry) if files.is_remote(entry.path) else _LocalFile(entry, verify)
        self._verified.add(shard)
        self._open[shard] = opened
        return opened


def count_token(corpus: Corpus, token: int) -> int:
    """How often `token` occurs in the corpus."""
    reader = ShardReader(corpus, 1)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    buffer: npt.NDArray[np.unsignedinteger] = np.empty(per_chunk, corpus.dtype)
    total = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            chunk = buffer[: min(per_chunk, shard.num_tokens - start)]
            reader.gather([number], [start], [0], [chunk.nbytes], memoryview(chunk.data).cast("B"))
            total += int(np.count_nonzero(chunk == token))
    return total
