"""Reader of values of indexed files, such as the tokens of a corpus's shards. It keeps a bounded number of files open."""

import itertools
import os
import resource
from collections.abc import Iterable, Iterator, Sequence
from threading import get_ident

import numpy as np
import numpy.typing as npt

from grain_sft.storage import activity, files
from grain_sft.storage.file_stamp import FileStamp
from grain_sft.storage.local_file import Identity, LocalFile
from grain_sft.storage.locks import ForkSafeLock
from grain_sft.storage.remote.options import RemoteOptions
from grain_sft.storage.remote.shards import RemoteShards
from grain_sft.storage.vectored_copy import Ints, copies

MOST_OPEN_FILES = 1024
_MANY_PIECES = 24  # least pieces of a gather that is copied; 8 of 180 tokens are read in 0.6 of the time of a copy
_SMALL_PIECE = 1 << 13  # bytes, most that its pieces have on average
_MIN_PIECES_PER_WAIT = 16  # a copy with fewer pieces per wait for the disk is slower than reads
_READS_AFTER_SLOW_COPY = 1 << 8  # gathers that read, after such a copy

IntsOrList = Sequence[int] | Ints
Buffers = tuple[memoryview, ...]
"""Buffers of bytes that one `os.preadv` fills in order."""

Pieces = tuple[Sequence[int], Sequence[int], Sequence[Buffers], int]
"""Pieces of files: each piece's file number, first value and buffers; last, the number of bytes of all pieces together."""

Run = tuple[Sequence[int], Sequence[int], Sequence[int], memoryview]
"""Pieces that fill one memory without gaps: each piece's file number, first value, and end in the memory. Then the memory,
whose items are values."""


class ShardReader:
    """Reader of values of a set of files, such as a corpus's tokens. Safe in threads.

    Long pieces are read with `preadv` straight into the batch. Many small pieces are copied from maps of their files by one
    system call (see `vectored_copy`), because a read costs a microsecond or more whatever its size. Where the files are not in
    the page cache, a copy is slower than reads: it waits for every page, and takes 1.3 times as long for pieces of 1 KB and
    twice as long for pieces of 6 KB. After a copy that often waited, the next gathers use `preadv`; then a copy is tried again.

    At most `max_open_files` stay open. The file that has been open longest is checked and makes room. It is closed when no
    thread reads from it.

    Args:
      shards: Files.
      itemsize: Bytes of a value, such as a token.
      max_open_files: Most open files; None means 1024, or a quarter of the process's limit (`ulimit -n`) if that is less.
      scattered: Whether reads are far apart and not repeated. Then the system reads nothing ahead and no file is mapped: a
        trace of a corpus that is not in the page cache takes a third of the time.
      remote: Options of remote files. None means those of the environment.
      whole_rows: Whether a value is a whole stored row, the tokens and the arrays after them. Otherwise, in files of stored
        rows, a value is a token.

    Attributes:
      plain: Whether no file is remote, and the values of a file have no gaps between them.
    """

    def __init__(
        self,
        shards: Sequence[FileStamp],
        itemsize: int,
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
        whole_rows: bool = False,
    ) -> None:
        if max_open_files is None:
            soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            max_open_files = MOST_OPEN_FILES if soft == resource.RLIM_INFINITY else min(MOST_OPEN_FILES, soft // 4)
        self._shards = shards
        any_remote = any(files.is_remote(shard.path) for shard in shards)
        self._remote = RemoteShards(shards, itemsize, remote) if any_remote else None
        rows = {None if whole_rows else getattr(shard, "row", None) for shard in shards}
        self._row: tuple[int, int] | None = rows.pop() if len(rows) == 1 else None
        self.plain = not self._remote and self._row is None
        self._itemsize, self._scattered, self._max_open_files = itemsize, scattered, max(1, max_open_files)
        self._open: dict[int, LocalFile] = {}  # oldest first
        self._verified: dict[int, Identity] = {}
        self._lock = ForkSafeLock()
        self._left_to_read = 0  # gathers until the next copy is tried

    def gather(
        self, shards: IntsOrList, starts: IntsOrList, places: IntsOrList, sizes: IntsOrList, out: memoryview
    ) -> None:
        """Fill the bytes `out[place : place + size]` of each piece with values of its shard from value `start` on.

        Raises:
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
        """
        columns = [np.asarray(each, np.int64) for each in (shards, starts, places, sizes)]
        if self._row is not None:
            columns = self._by_row(self._row, columns)
        if not (self._remote or self._scattered) and self._copy(columns, out):
            return
        if self._remote:
            columns = self._remote.gather(columns, out)
        numbers, begins, offsets, lengths = (each.tolist() for each in columns)
        total = sum(lengths)
        activity.count("local_bytes", total)
        buffers = [(out[place : place + size],) for place, size in zip(offsets, lengths, strict=True)]
        self._read((numbers, begins, buffers, total))
        self._check(set(numbers))

    def _by_row(self, row: tuple[int, int], columns: list[Ints]) -> list[Ints]:
        """Return the pieces cut at the ends of rows. Their starts count the gaps between rows too, in values.

        Args:
          row: Number of values of a row, and the distance from one row to the next, in values.
          columns: Shards, starts, places and sizes, as in `gather`.
        """
        shards, starts, places, sizes = columns
        length, stride = row
        stops = starts + sizes // self._itemsize
        first = starts // length
        counts = np.maximum(1, -(-stops // length) - first)
        piece = np.arange(len(starts)).repeat(counts)
        of_row = first[piece] + np.arange(len(piece)) - (counts.cumsum() - counts)[piece]
        begins = np.maximum(starts[piece], of_row * length)
        ends = np.minimum(stops[piece], (of_row + 1) * length)
        in_file = of_row * stride + begins - of_row * length
        to = places[piece] + (begins - starts[piece]) * self._itemsize
        return [shards[piece], in_file, to, (ends - begins) * self._itemsize]

    def _read(self, pieces: Pieces) -> None:
        """Read pieces of local files. The caller calls `_check` before the values are used."""
        (shards, starts, buffers, num_bytes), num_read = pieces, 0
        opened, itemsize, preadv = self._open, self._itemsize, os.preadv
        if shards:
            first = self._shards[shards[0]]
            activity.doing[get_ident()] = activity.READING, len(shards), first, first.data_offset + starts[0] * itemsize
        try:
            for shard, start, out in zip(shards, starts, buffers):  # noqa: B905
                file = opened.get(shard) or self._open_file(shard)
                num_read += preadv(file.fd, out, file.data_offset + start * itemsize)
        except OSError:
            num_read = -1
        if num_read != num_bytes:  # read the rest of a short read, or raise its error
            for shard, start, out in zip(shards, starts, buffers, strict=True):
                file = opened.get(shard) or self._open_file(shard)
                file.read_again(file.data_offset + start * itemsize, out)

    def _check(self, shards: Iterable[int]) -> None:
        """Check, after reads, that the files have not changed since they were indexed. `_make_room` checked those it closed."""
        for shard in shards:
            if (file := self._open.get(shard)) is not None:
                file.check_unchanged()

    def values(self, shards: Ints | None, starts: Ints) -> npt.NDArray[np.uint8]:
        """Return value `starts[i]` of file `shards[i]` for each i: uint8 [n, itemsize]. `shards` None means the first file."""
        count, size = len(starts), self._itemsize
        found: npt.NDArray[np.uint8] = np.empty((count, size), np.uint8)
        numbers = [0] * count if shards is None else shards.tolist()
        self.gather(numbers, starts.tolist(), range(0, count * size, size), [size] * count, found.reshape(-1).data)
        return found

    def fill(self, runs: Sequence[Run]) -> Iterator[None]:
        """Fill the memory of each run in turn, and yield after each, so that the caller uses it while it is in the processor's
        cache. The files are checked after the last run."""
        if not self.plain or len(self._shards) > 1:
            yield from self.read_groups([self._pieces(run) for run in runs])
            return
        # one file needs no lists of buffers, which make batches of padded rows 20 to 27 % slower
        file = self._open.get(0) or self._open_file(0)
        fd, begin, size, preadv, total = file.fd, file.data_offset, self._itemsize, os.preadv, 0
        first = runs[0][1] if runs else ()
        activity.doing[get_ident()] = activity.READING, len(runs), file.shard, begin + (first[0] if first else 0) * size
        for run in runs:
            _, starts, stops, memory = run
            place = num_read = 0
            try:
                for start, stop in zip(starts, stops):  # noqa: B905
                    num_read += preadv(fd, (memory[place:stop],), begin + start * size)
                    place = stop
            except OSError:
                num_read = -1
            if num_read != place * size:
                self._read(self._pieces(run))
            total += stops[-1] * size if stops else 0
            yield
        file.check_unchanged()
        activity.count("local_bytes", total)

    def _pieces(self, run: Run) -> Pieces:
        shards, starts, stops, memory = run
        buffers = [(memory[at:to].cast("B"),) for at, to in zip([0, *stops], stops, strict=False)]
        return shards, starts, buffers, sum(len(out) for (out,) in buffers)

    def read_groups(self, groups: Sequence[Pieces]) -> Iterator[None]:
        """Fill the buffers of each group in turn, and yield after each. The files are checked after the last group."""
        if self.plain:
            used, total = set[int](), 0
            for group in groups:
                self._read(group)
                used.update(group[0])
                total += group[3]
                yield
            self._check(used)
            activity.count("local_bytes", total)
            return
        sizes = [sum(map(len, out)) for _, _, buffers, _ in groups for out in buffers]
        places = [0, *itertools.accumulate(sizes)]
        found = memoryview(bytearray(places.pop()))
        shards = [shard for group in groups for shard in group[0]]
        starts = [start for group in groups for start in group[1]]
        self.gather(shards, starts, places, sizes, found)
        for _, _, buffers, _ in groups:
            for view in itertools.chain.from_iterable(buffers):
                view[:], found = found[: len(view)], found[len(view) :]
            yield

    def _copy(self, columns: list[Ints], out: memoryview) -> bool:
        """Copy many small pieces from maps of their files. Return False if they are still to be read, with `preadv`."""
        shards, starts, places, sizes = columns
        if len(sizes) < _MANY_PIECES or (total := int(sizes.sum())) > len(sizes) * _SMALL_PIECE:
            return False
        if self._left_to_read:
            self._left_to_read -= 1
            return False
        distinct = sorted(set(shards.tolist())) if len(self._shards) > 1 else [0]
        if 2 * len(distinct) > self._max_open_files:  # a mapped file has two descriptors
            return False
        files = [self._mapped(shard) for shard in distinct]  # this list keeps them open while other threads make room
        if not all(file.address for file in files):
            return False
        ranges = [(file.address + file.data_offset, file.shard.size - file.data_offset) for file in files]
        base, length = np.array(ranges).T
        if len(files) > 1:
            at = np.searchsorted(distinct, shards)
            base, length = base[at], length[at]
        from_start, ends = starts * self._itemsize, places + sizes
        left = length - (from_start + sizes)
        if np.minimum.reduce(left | from_start | places | sizes) < 0 or np.maximum.reduce(ends) > len(out):
            return False  # wrong pieces: a read raises the error
        activity.doing[get_ident()] = activity.COPYING, len(sizes), files[0].shard, len(files) - 1
        waits = _disk_waits()
        done = copies(from_start + base, places, ends, out)
        if (_disk_waits() - waits) * _MIN_PIECES_PER_WAIT > len(sizes):
            self._left_to_read = _READS_AFTER_SLOW_COPY
        for file in files:
            file.check_unchanged()
        if done:
            activity.count("local_bytes", total)
        return done

    def _mapped(self, shard: int) -> LocalFile:
        file = self._open.get(shard) or self._open_file(shard)
        if not file.address:
            with self._lock.lock:
                self._make_room(file)
                file.map()
        return file

    def _open_file(self, shard: int) -> LocalFile:
        """Return the open file of a shard; open it, and make room for it, if it is not open."""
        with self._lock.lock:
            found = self._open.get(shard)
            if found is None:
                self._make_room()
                found = LocalFile(self._shards[shard], self._verified.get(shard), self._scattered)
                self._verified[shard] = found.identity
                self._open[shard] = found
            return found

    def _make_room(self, keep: LocalFile | None = None) -> None:
        """Check and drop the files that have been open longest, until one more descriptor may be opened."""
        in_use = len(self._open) + sum(1 for file in self._open.values() if file.address)
        for shard, file in list(self._open.items()):
            if in_use < self._max_open_files:
                return
            if file is not keep:
                file.check_unchanged()  # a batch that is being read may have tokens of it
                del self._open[shard]
                in_use -= 2 if file.address else 1


def _disk_waits() -> int:
    """Return the number of page faults of this thread, so far, that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
