"""HostCache: model of one host's shard cache, of the sizes of its blocks without their bytes."""

from collections import OrderedDict
from collections.abc import Iterable

from grain_sft.storage import CacheOptions, cache_blocks, remote_files, shard_cache

Piece = tuple[str, int, int, int]
"""Path of a file, its size, the first byte of the piece, and its number of bytes."""

_Key = tuple[str, int]


class HostCache:
    """Blocks in one host's shard cache, by the rules of `grain_sft.storage.shard_cache`.

    Args:
      options: Size limit and block size of the cache.

    Attributes:
      hits, misses: Numbers of reads of a block that found it in the cache, and of those that did not.
      used: Bytes of the files of all blocks.
    """

    def __init__(self, options: CacheOptions) -> None:
        self._max, self._unit = int(options.max_bytes) - cache_blocks.LOCK_BYTES, options.unit and int(options.unit)
        self._blocks: OrderedDict[_Key, int] = OrderedDict()  # bytes of each file, the least recently used one first
        self.hits = self.misses = self.used = 0

    def read(self, pieces: Iterable[Piece]) -> tuple[int, int]:
        """Read the pieces of one gather. Return the number of requests and the bytes of their answers."""
        jobs: dict[_Key, tuple[int, list[int]]] = {}  # bytes of each block, and of each part of it that is read
        for path, file_size, offset, size in pieces:
            unit = self._unit or max(1, file_size)
            for number in range(offset // unit, -(-(offset + size) // unit)):
                start, stop = number * unit, min(file_size, (number + 1) * unit)
                wanted = jobs.setdefault((path, number), (stop - start, []))[1]
                wanted.append(min(offset + size, stop) - max(offset, start))
        missing = {key: job for key, job in jobs.items() if not self._touch(key)}
        self.hits, self.misses = self.hits + len(jobs) - len(missing), self.misses + len(missing)
        requests = received = 0
        for batch in shard_cache.batches(missing.items(), lambda item: item[1][0]):
            reserved: dict[_Key, int] = {}
            for key, (size, wanted) in batch:
                taken = cache_blocks.file_size(size)
                if self._reserve(taken, sum(reserved.values())):
                    reserved[key] = taken
                    requests, received = requests + -(-size // remote_files.PART_BYTES), received + size
                else:
                    requests, received = requests + len(wanted), received + sum(wanted)
            self._blocks.update(reserved)
        return requests, received

    def _touch(self, key: _Key) -> bool:
        if found := key in self._blocks:
            self._blocks.move_to_end(key)
        return found

    def _reserve(self, size: int, unfinished: int) -> bool:
        """Make room for a file of `size` bytes, and return whether it fits. Files of `unfinished` bytes must stay."""
        if self.used + size > self._max and unfinished + size <= self._max:
            goal = max(unfinished, min(self._max - size, self._max - self._max // cache_blocks.SPARE))
            while self.used > goal and self._blocks:
                self.used -= self._blocks.popitem(last=False)[1]
        fits = self.used + size <= self._max
        self.used += size if fits else 0
        return fits
