"""Model of one host's shard cache, for simulated runs."""

from collections import OrderedDict
from collections.abc import Iterable

from grain_sft.storage import CacheOptions, cache_blocks, remote_files, shard_cache

Piece = tuple[str, int, int, int]
"""Range of bytes that a host reads: path and size of the file, offset and size of the range."""

_Key = tuple[str, int]
"""Path of a file, and the number of a block in it."""


class HostCache:
    """Model of one host's shard cache. It keeps and removes the same blocks as `grain_sft.storage.shard_cache`.

    A block is a whole file or, if `options.unit` is set, `unit` bytes of a file. The model reads and writes no file.

    Attributes:
      hits: Number of blocks that `read` found in the cache. One call counts a block once.
      misses: Number of blocks that `read` did not find in the cache.
      used: Bytes that all blocks in the cache take on disk.
    """

    def __init__(self, options: CacheOptions) -> None:
        self._max = int(options.max_bytes) - cache_blocks.LOCK_BYTES
        self._block_bytes = options.unit and int(options.unit)
        # bytes that each block in the cache takes on disk, the least recently used block first
        self._file_bytes: OrderedDict[_Key, int] = OrderedDict()
        self.hits = self.misses = self.used = 0

    def read(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        """Count reads that a batch makes at the same time. Return the number of requests and the bytes of their answers."""
        sizes: dict[_Key, int] = {}
        parts: dict[_Key, list[int]] = {}  # by block: number of bytes that each piece reads from the block
        for path, file_size, offset, size in pieces:
            unit = self._block_bytes or max(1, file_size)
            for number in range(offset // unit, -(-(offset + size) // unit)):  # -(-a // b) is a / b, rounded up
                start, stop = number * unit, min(file_size, (number + 1) * unit)
                sizes[path, number] = stop - start
                parts.setdefault((path, number), []).append(min(offset + size, stop) - max(offset, start))
        found = [key for key in sizes if key in self._file_bytes]
        for key in found:
            self._file_bytes.move_to_end(key)
        missing = [key for key in sizes if key not in self._file_bytes]
        self.hits += len(found)
        self.misses += len(missing)
        requests = received = 0
        # the cache fetches the blocks of one such batch together
        for batch in shard_cache.batches(missing, sizes.__getitem__):
            stored: dict[_Key, int] = {}
            for key in batch:
                file_bytes = cache_blocks.file_size(sizes[key])
                if self._reserve(file_bytes, sum(stored.values())):
                    stored[key] = file_bytes
                    requests += -(-sizes[key] // remote_files.PART_BYTES)
                    received += sizes[key]
                else:  # each piece requests only its own bytes of the block
                    requests += sum(-(-size // remote_files.PART_BYTES) for size in parts[key])
                    received += sum(parts[key])
            self._file_bytes.update(stored)
        return requests, received

    def _reserve(self, size: int, unfinished: int) -> bool:
        """Remove blocks to make room for a file of `size` bytes, and add `size` to `used`. Return whether the file fits.

        Other blocks of the same batch of `shard_cache.batches` have reserved `unfinished` bytes. They stay in the cache.
        """
        if self.used + size > self._max and unfinished + size <= self._max:
            # remove more blocks than needed, so that there is room for the next blocks, too
            with_spare = self._max - self._max // cache_blocks.SPARE
            used_after = max(unfinished, min(self._max - size, with_spare))
            while self.used > used_after and self._file_bytes:
                _, freed = self._file_bytes.popitem(last=False)
                self.used -= freed
        if self.used + size > self._max:
            return False
        self.used += size
        return True
