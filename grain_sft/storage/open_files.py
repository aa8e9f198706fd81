"""The local files that a reader has open: a bounded number of them."""

import resource
from collections.abc import Iterable, Sequence

from grain_sft.storage.file_stamp import FileStamp
from grain_sft.storage.local_file import Identity, LocalFile
from grain_sft.storage.locks import ForkSafeLock

MOST_OPEN_FILES = 1024


class OpenFiles(dict[int, LocalFile]):
    """Open files by their number in `shards`. `open_files[number]` opens a file that is not open. Safe in threads.

    The file that was opened first makes room for a new one. It is closed when no thread reads from it any more.

    Args:
      shards: All files.
      max_open_files: Most descriptors; None means 1024, or a quarter of the process's limit (`ulimit -n`) if that is less.
      scattered: Whether reads are far apart and not repeated, so that the system need not read ahead.
    """

    def __init__(self, shards: Sequence[FileStamp], max_open_files: int | None, *, scattered: bool) -> None:
        super().__init__()
        if max_open_files is None:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            max_open_files = MOST_OPEN_FILES if limit == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, limit // 4)
        self.max_descriptors = max(1, max_open_files)
        self._shards = shards
        self._scattered = scattered
        self._verified: dict[int, Identity] = {}  # also of closed files: their ends are not read again
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
        """Return a file that is open and, if its file system allows, mapped. A mapped file has two descriptors."""
        file = self[number]
        if not file.address:
            with self._lock.lock:
                self._make_room(file)
                file.map()
        return file

    def check(self, numbers: Iterable[int]) -> None:
        """Check, after reads, that files have not changed since they were indexed. Files that made room were checked then."""
        for number in numbers:
            file = self.get(number)
            if file is not None:
                file.check_unchanged()

    def _make_room(self, keep: LocalFile | None = None) -> None:
        """Check and drop the files that were opened first, except `keep`, until one more descriptor may be opened."""
        in_use = len(self) + sum(1 for file in self.values() if file.address)
        for number, file in list(self.items()):
            if in_use < self.max_descriptors:
                return
            if file is not keep:
                file.check_unchanged()  # the batch that is being read may have tokens of it
                del self[number]
                in_use -= 2 if file.address else 1
