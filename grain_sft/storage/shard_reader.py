"""Reader of values of indexed files, such as the tokens of a corpus's shards."""

import itertools
import os
import resource
from collections.abc import Iterator, Sequence
from threading import get_ident

import numpy as np
import numpy.typing as npt

from grain_sft.storage import activity, files
from grain_sft.storage.file_stamp import FileStamp
from grain_sft.storage.local_file import OpenFiles
from grain_sft.storage.remote_options import RemoteOptions
from grain_sft.storage.remote_shards import RemoteShards
from grain_sft.storage.vectored_copy import copy_pieces
from grain_sft.types import Ints

# `gather` either reads each piece of a file, or copies all pieces at once from memory maps (see `ShardReader`).
_FEWEST_COPIED = 24  # fewer pieces are read, not copied: reading 8 pieces of 180 tokens takes 0.6 of the time of a copy
_LARGEST_COPIED = 1 << 13  # bytes; pieces of a larger mean size are read, not copied
_PIECES_PER_WAIT = 16  # a copy that waits for the disk more often than once in 16 pieces is slower than reads
_READS_AFTER_SLOW_COPY = 1 << 8  # after a copy that waited too often, this many calls of `gather` make no copy
_COPIES_PER_RELEASE = 1 << 12  # copies after which the memory of the maps' pages is freed

IntsOrList = Sequence[int] | Ints
Buffers = tuple[memoryview, ...]
"""Memory that one `os.preadv` fills in order."""

Pieces = tuple[Sequence[int], Sequence[int], Sequence[Buffers], int]
"""Pieces of files, as a tuple: for each piece, the file number, the index of its first value, and its buffers; then the number
of bytes of all pieces."""

RowPieces = tuple[Sequence[int], Sequence[int], Sequence[int], memoryview]
"""Pieces that fill the memory of a row without gaps, as a tuple: for each piece, the file number, the index of its
first value, and its end; then the memory.

The end of a piece is an index into the memory, counted in values. Example: ([0, 0], [50, 7], [3, 5], memory) fills memory[0:3]
with values 50 to 52 of file 0, and memory[3:5] with values 7 and 8 of file 0.
"""


class ShardReader:
    """Reader of values of a set of files, such as a corpus's tokens. Safe in threads.

    A piece is consecutive values of one file. Long pieces are read with `preadv` straight into the batch. Many small pieces are
    copied from memory maps of their files by one system call, since each read costs a microsecond or more. If the files are not
    in the page cache, copies take 1.3 to 2 times as long as reads. So after a copy that often waited for the disk, the next
    calls of `gather` only read.

    Args:
      shards: Files to read. Methods name a file by its number in this sequence.
      itemsize: Bytes of a value, such as a token.
      max_open_files: Maximum number of descriptors. None means 1024, or a quarter of `ulimit -n` if that is less.
      scattered: Whether reads are far apart and not repeated. If so, the system reads nothing ahead, and no file is mapped.
        If a corpus is not in the page cache, `grain-sft trace` then takes a third of the time.
      remote: Options for reading remote files. The default is the options that environment variables set.
      whole_rows: Whether a value is a whole row instead of a token, in files of materialized rows.

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
        self._shards, self._itemsize, self._scattered = shards, itemsize, scattered
        any_remote = any(files.is_remote(shard.path) for shard in shards)
        self._remote = RemoteShards(shards, itemsize, remote) if any_remote else None
        # For materialized rows: (number of tokens of a row, number of values from one row's start to the next), the same in all
        # files. None for other files, and with `whole_rows`.
        self._row_size: tuple[int, int] | None = None if whole_rows or not shards else getattr(shards[0], "row", None)
        self.plain = not self._remote and self._row_size is None
        self._open = OpenFiles(shards, max_open_files, scattered=scattered)
        self._num_copies = 0
        self._reads_until_copy = 0

    def gather(self, shards: IntsOrList, starts: IntsOrList, places: IntsOrList, sizes: IntsOrList, out: memoryview) -> None:
        """Fill the bytes `out[place : place + size]` of each piece with the values of its shard from index `start` on.

        Raises:
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
        """
        columns = [np.asarray(column, np.int64) for column in (shards, starts, places, sizes)]
        if self._row_size is not None:
            columns = _cut_at_rows(columns, *self._row_size, self._itemsize)
        if not (self._remote or self._scattered) and self._copy(columns, out):
            return
        if self._remote:
            columns = self._remote.gather(columns, out)  # the remaining pieces are of local files
        numbers, firsts, offsets, lengths = (column.tolist() for column in columns)
        buffers = [(out[offset : offset + length],) for offset, length in zip(offsets, lengths, strict=True)]
        self._read_and_check((numbers, firsts, buffers, sum(lengths)))

    def fill_rows(self, shards: Ints | None, starts: Ints, rows: list[Buffers]) -> bool:
        """Fill `rows[i]`, buffers of bytes, with values of shard `shards[i]` from index `starts[i]` on, and return True.

        All rows have one size. Without `shards`, read the first shard. Errors are those of `gather`.

        Return False, and read nothing, if a file is remote, if materialized rows have other arrays between their tokens, or if
        `gather` is likely to be faster. Windows take 9 % less time than with `gather` (`bench --only windows`).
        """
        size = sum(map(len, rows[0])) if rows else 0
        if not self.plain or (len(rows) >= _FEWEST_COPIED and size <= _LARGEST_COPIED and not self._scattered):
            return False
        if shards is not None:
            self._read_and_check((shards.tolist(), starts.tolist(), rows, size * len(rows)))
            return True
        # `_read_and_check`, inlined for one file: stored rows take 2 % less time (`bench --only packed`)
        numbers, firsts, num_bytes = [0] * len(rows), starts.tolist(), size * len(rows)
        file, itemsize = self._open[0], self._itemsize
        activity.doing[get_ident()] = _describe_read, self._shards, itemsize, numbers, firsts
        data_offset = file.data_offset
        offsets = [data_offset + start * itemsize for start in firsts]
        try:
            num_read = sum(map(os.preadv, itertools.repeat(file.fd), rows, offsets))
        except OSError:
            num_read = -1
        if num_read != num_bytes:
            self._read((numbers, firsts, rows, num_bytes))
        file.check_unchanged()
        activity.count("local_bytes", num_bytes)
        return True

    def _read_and_check(self, pieces: Pieces) -> None:
        shards, _, _, num_bytes = pieces
        self._read(pieces)
        self._open.check(set(shards))
        activity.count("local_bytes", num_bytes)

    def _read(self, pieces: Pieces) -> None:
        """Read pieces of local files, without a check that the files are unchanged."""
        shards, starts, buffers, num_bytes = pieces
        open_files, itemsize, preadv = self._open, self._itemsize, os.preadv
        activity.doing[get_ident()] = _describe_read, self._shards, itemsize, shards, starts
        num_read = 0
        try:
            for shard, start, out in zip(shards, starts, buffers):  # noqa: B905
                file = open_files[shard]
                num_read += preadv(file.fd, out, file.data_offset + start * itemsize)
        except OSError:
            num_read = -1
        if num_read != num_bytes:  # a read failed or came back short
            for shard, start, out in zip(shards, starts, buffers, strict=True):
                file = open_files[shard]
                file.read_again(file.data_offset + start * itemsize, out)

    def values(self, shards: Ints | None, starts: Ints) -> npt.NDArray[np.uint8]:
        """Return value `starts[i]` of shard `shards[i]` for each i: uint8 [n, itemsize]. Without `shards`, read shard 0."""
        count, size = len(starts), self._itemsize
        values: npt.NDArray[np.uint8] = np.empty((count, size), np.uint8)
        numbers = [0] * count if shards is None else shards.tolist()
        self.gather(numbers, starts.tolist(), range(0, count * size, size), [size] * count, values.reshape(-1).data)
        return values

    def fill(self, rows: Sequence[RowPieces]) -> Iterator[None]:
        """Fill the rows in order. Yield after each row, so that the caller can use it while it is in the processor's cache.

        The files are checked after the last row.
        """
        if not self.plain or len(self._shards) > 1:
            yield from self.read_groups([self._pieces(row) for row in rows])
            return
        # read here, not by `_read`, because making its list of buffers would slow batches of padded rows by 20 to 27 %
        file = self._open[0]
        fd, data_offset, itemsize, preadv = file.fd, file.data_offset, self._itemsize, os.preadv
        first_start = next((starts[:1] for _, starts, _, _ in rows if starts), [])
        activity.doing[get_ident()] = _describe_read, self._shards, itemsize, [0] * len(rows), first_start
        total = 0
        for row in rows:
            _, starts, ends, memory = row
            place = num_read = 0
            try:
                for start, end in zip(starts, ends):  # noqa: B905
                    num_read += preadv(fd, (memory[place:end],), data_offset + start * itemsize)
                    place = end
            except OSError:
                num_read = -1
            if num_read != place * itemsize:  # a read failed or came back short
                self._read(self._pieces(row))
            total += ends[-1] * itemsize if ends else 0
            yield
        file.check_unchanged()
        activity.count("local_bytes", total)

    def _pieces(self, row: RowPieces) -> Pieces:
        """Return the pieces of a row, each with its buffer in the row's memory."""
        shards, starts, ends, memory = row
        buffers = [(memory[place:end],) for place, end in zip([0, *ends], ends)]  # noqa: B905
        return shards, starts, buffers, ends[-1] * self._itemsize if ends else 0

    def read_groups(self, groups: Sequence[Pieces]) -> Iterator[None]:
        """Fill the buffers of the groups in order, and yield after each group. The files are checked after the last group."""
        if self.plain:
            for group in groups:
                self._read(group)
                yield
            self._open.check(set[int]().union(*(shards for shards, _, _, _ in groups)))
            activity.count("local_bytes", sum(num_bytes for _, _, _, num_bytes in groups))
            return
        # read all groups at once, so that all requests to a bucket run together
        sizes = [sum(buffer.nbytes for buffer in buffers) for _, _, by_piece, _ in groups for buffers in by_piece]
        *places, total = itertools.accumulate(sizes, initial=0)
        data = memoryview(bytearray(total))
        all_shards = [shard for shards, _, _, _ in groups for shard in shards]
        self.gather(all_shards, [start for _, starts, _, _ in groups for start in starts], places, sizes, data)
        place = 0
        for _, _, by_piece, _ in groups:
            for buffer in itertools.chain.from_iterable(by_piece):
                buffer.cast("B")[:] = data[place : place + buffer.nbytes]
                place += buffer.nbytes
            yield

    def _copy(self, columns: list[Ints], out: memoryview) -> bool:
        """Copy many small pieces from maps of their files. Return False if the caller has to read them instead."""
        shards, starts, places, sizes = columns
        if len(sizes) < _FEWEST_COPIED or (total := int(sizes.sum())) > len(sizes) * _LARGEST_COPIED:
            return False
        if self._reads_until_copy:
            self._reads_until_copy -= 1
            return False
        numbers = sorted(set(shards.tolist())) if len(self._shards) > 1 else [0]
        if 2 * len(numbers) > self._open.max_descriptors:  # a mapped file has two descriptors
            return False
        mapped = [self._open.mapped(number) for number in numbers]  # this list keeps the files open during the copy
        if not all(file.address for file in mapped):  # a file could not be mapped
            return False
        data_ranges = [(file.address + file.data_offset, file.shard.size - file.data_offset) for file in mapped]
        addresses, lengths = np.array(data_ranges).T
        if len(mapped) > 1:  # the arrays of one file broadcast to all pieces
            file_of_piece = np.searchsorted(numbers, shards)
            addresses, lengths = addresses[file_of_piece], lengths[file_of_piece]
        offsets = starts * self._itemsize
        ends = places + sizes
        left_in_file = lengths - (offsets + sizes)
        # `a | b` is negative if a or b is: one reduction checks all four arrays
        if np.minimum.reduce(left_in_file | offsets | places | sizes) < 0 or np.maximum.reduce(ends) > len(out):
            return False  # for a piece outside of its file, the read raises the error
        activity.doing[get_ident()] = activity.COPYING, len(sizes), mapped[0].shard, len(mapped) - 1
        waits_before = _disk_waits()
        is_complete = copy_pieces(offsets + addresses, places, ends, out)
        if (_disk_waits() - waits_before) * _PIECES_PER_WAIT > len(sizes):
            self._reads_until_copy = _READS_AFTER_SLOW_COPY
        for file in mapped:
            file.check_unchanged()
        self._num_copies += 1
        if self._num_copies % _COPIES_PER_RELEASE == 0:
            for file in mapped:
                file.release_pages()
        if is_complete:
            activity.count("local_bytes", total)
        return is_complete


def _cut_at_rows(columns: list[Ints], length: int, stride: int, itemsize: int) -> list[Ints]:
    """Return pieces of materialized rows, cut where rows end. The columns are those of `ShardReader.gather`.

    A row has its `length` tokens first, then other arrays, such as positions. The given starts count only the tokens of a file.
    The returned starts also count the other arrays, in units of a token's size. Example: with a `length` of 4 and a `stride` of
    6 values, row 1 begins at value 6. The piece of tokens 2 to 5 then becomes two: values 2 and 3, and values 6 and 7.
    """
    shards, starts, places, sizes = columns
    stops = starts + sizes // itemsize
    first_rows = starts // length
    num_parts = np.maximum(1, -(-stops // length) - first_rows)
    piece = np.arange(len(starts)).repeat(num_parts)  # number of the piece of each part
    first_parts = num_parts.cumsum() - num_parts
    part_in_piece = np.arange(len(piece)) - first_parts[piece]
    row = first_rows[piece] + part_in_piece
    part_starts = np.maximum(starts[piece], row * length)
    part_stops = np.minimum(stops[piece], (row + 1) * length)
    starts_in_file = row * stride + part_starts - row * length
    part_places = places[piece] + (part_starts - starts[piece]) * itemsize
    return [shards[piece], starts_in_file, part_places, (part_stops - part_starts) * itemsize]


def _describe_read(files: Sequence[FileStamp], itemsize: int, shards: Sequence[int], starts: Sequence[int]) -> str:
    """Describe a read of pieces. Only the watchdog calls this: a call for each read would take 3 % of the time of chat rows."""
    if not starts:
        return "reading 0 pieces"
    first = files[shards[0]]
    offset = first.data_offset + starts[0] * itemsize
    return f"reading {len(shards)} pieces, the first from {first.path} at byte {offset}"


def _disk_waits() -> int:
    """Return the number of this thread's page faults that waited for a disk."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
