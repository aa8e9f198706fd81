"""Reading rows that were written out: tokens, positions and segments of a row in one read.

In a file a row's tokens are followed by what belongs to them, so that a row is one read; it is widened from there. What belongs
to them are arrays of small integers or, where segments are long, the places where they end.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError
from grain_sft.source.arrays import Arrays, Stack
from grain_sft.source.segment_reader import ARRAYS, ZERO, Counting, SegmentRow
from grain_sft.storage import Buffers, RemoteOptions, ShardReader, StampedFile, activity

if TYPE_CHECKING:
    from grain_sft.corpus import Corpus

Ints = npt.NDArray[np.int64]

_BLOCK_TOKENS = 1 << 15  # worked on at once, in whole rows


_Int32 = npt.NDArray[np.int32]
ReadyArrays = tuple[_Int32, _Int32, _Int32, _Int32, _Int32, npt.NDArray[Any] | None]
"""Arrays [rows, L] of ready rows: tokens, targets (the tokens one place further on, 0 at the end of a row), positions, segment
ids, and segment ids of targets, int32; and loss, bool or float32, None where it was not asked for or every token takes it."""


class _Block(NamedTuple):
    """Some rows of a batch.

    Attributes:
      rows: which these are.
      size: bytes, of all of them in their files.
      buffers: what each of them is read into.
      copied: what is copied then, in this order: to a view of the batch's arrays, at a place in it, from another.
      by_ends: of each row that says where its segments end, that, and views of its arrays.
    """

    rows: slice
    size: int
    buffers: list[Buffers]
    copied: list[tuple[Any, Any, Any]]
    by_ends: list[tuple[memoryview, SegmentRow]]


class RowReader:
    """Reads rows of a corpus that has them ready. Safe in threads.

    Some rows at a time are read and made arrays of: what was read is in the processor's cache then.

    Args:
      corpus: one with `rows`.
      max_open_files: as in ShardReader.
    """

    def __init__(self, corpus: Corpus, max_open_files: int | None = None) -> None:
        assert corpus.rows is not None
        shards, length = corpus.shards, corpus.rows.sequence_length
        self._counting = Counting(length) if corpus.rows.most_segments else None
        self._all_take_loss = not corpus.rows.segments_dtype
        losses = [shard.loss for shard in shards if shard.loss is not None]
        self._length, self._wide = length, corpus.dtype.itemsize == 4
        self._begins: Ints = np.cumsum([0] + [shard.num_tokens // length for shard in shards])[:-1]
        self._losses, self._weighted = losses, corpus.has_weights
        self._rows = _Rows(shards, corpus.rows.dtype(corpus.dtype), max_open_files, corpus.remote)
        loss: np.dtype[Any] = np.dtype([("loss", np.float32 if self._weighted else np.uint8, (length,))])
        self._loss = _Rows(losses, loss, max_open_files, corpus.remote) if losses else None

    def read(self, rows: Ints, arrays: Arrays, *, only_weights: bool = False) -> ReadyArrays:
        """Rows `rows`, each in range, in int32 arrays [rows, L] made by `arrays`.

        Args:
          only_weights: no loss where it is a mask, which the segment ids of targets hold already.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
          CorpusError: a weight that is negative or not finite, or segments that end nowhere in their row.
        """
        shards, count = None, len(rows)
        if len(self._begins) > 1:
            shards = self._begins.searchsorted(rows, side="right") - 1
            rows = rows - self._begins[shards]
        blocks, (tokens, targets, segments, positions, target_segments) = arrays.stack(
            ARRAYS, (count, self._length), self._blocks
        )
        reader = self._rows
        at = reader.places_of(shards, rows)
        if at is not None:
            files, fds, offsets = at
            if count:
                activity.doing[get_ident()] = activity.READING_ROWS, len(offsets), files[0].shard, offsets[0]
            for block in blocks:
                here, size, buffers, *_ = block
                try:
                    done = sum(map(os.preadv, fds[here], buffers, offsets[here]))
                except OSError:
                    done = 0
                if done != size:
                    reader.read_again(None if shards is None else shards[here], offsets[here], buffers)
                self._widen(block)
            for file in files if shards is None else set(files):
                file.check_unchanged()
            activity.count(local_bytes=count * reader.dtype.itemsize)
        else:
            memory = reader.fetch(shards, rows)
            for block in blocks:
                _fill(block.buffers, memory[block.rows])
                self._widen(block)
        loss = None
        if self._loss is not None and (self._weighted or not only_weights):
            loss = self._read_loss(self._loss, shards, rows)
        return tokens, targets, positions, segments, target_segments, loss

    def _widen(self, block: _Block) -> None:
        """Make arrays of what was read."""
        _, _, _, copied, by_ends = block
        for array, place, source in copied:
            array[place] = source
        try:
            for table, row in by_ends:
                ends = table[1 : 1 + table[0]].tolist()
                if len(ends) != table[0]:
                    raise IndexError
                row.fill(ends, self._all_take_loss)
        except (IndexError, ValueError) as error:
            raise CorpusError(
                f"{self._rows.folder}: a row whose segments end nowhere in it. It is damaged: write the rows again."
            ) from error

    def _blocks(self, stack: Stack) -> list[_Block]:
        """How the rows of a batch are read and copied to the arrays of `stack`, in the order in which `read` has them."""
        tokens, targets, segments, positions, target_segments = stack.arrays
        count, length = tokens.shape
        size = max(1, min(count, (_BLOCK_TOKENS if self._counting is None else 2 * _BLOCK_TOKENS) // length))
        row = self._rows.dtype
        memory = Arrays().empty((size, row.itemsize), np.uint8, 1)
        planes = _planes(memory, row)
        beside = _bytes_of_rows(memory[:, planes["tokens"].nbytes // size :]) if self._wide else _bytes_of_rows(memory)
        of_planes = {"positions": positions, "segment_ids": segments, "target_segment_ids": target_segments}
        blocks = []
        for begin in range(0, count, size):
            here = slice(begin, min(begin + size, count))
            found = {name: plane[: here.stop - begin] for name, plane in planes.items()}
            copied: list[tuple[Any, Any, Any]] = [] if self._wide else [(tokens[here], ..., found["tokens"])]
            following = tokens[here].reshape(-1).data[1:]  # of the next row at the end of each, but for the last
            copied.append((targets[here].reshape(-1).data[:-1], slice(None), following))
            copied.append((targets[here, -1], ..., ZERO))
            copied += [(array[here], ..., found[name]) for name, array in of_planes.items() if name in found]
            buffers: list[Buffers] = [(each,) for each in beside]
            if self._wide:
                buffers = list(zip(stack.rows[here], beside, strict=False))
            by_ends = []
            if self._counting is not None:
                rows = (SegmentRow(stack, number, self._counting) for number in range(here.start, here.stop))
                by_ends = list(zip((table.view(np.int64).data for table in found["ends"]), rows, strict=False))
            blocks.append(_Block(here, (here.stop - begin) * row.itemsize, buffers, copied, by_ends))
        return blocks

    def _read_loss(self, reader: _Rows, shards: Ints | None, rows: Ints) -> npt.NDArray[Any]:
        loss = _planes(reader.fetch(shards, rows), reader.dtype)["loss"]
        if not self._weighted:
            taken: npt.NDArray[np.bool_] = loss != 0
            return taken
        if loss.size and not (loss.min() >= 0 and loss.max() < np.inf):  # both are false for NaN
            row = int(np.flatnonzero((~np.isfinite(loss) | (loss < 0)).any(axis=1))[0])
            path = self._losses[0 if shards is None else shards[row]].path
            raise CorpusError(f"{path}: a weight of row {rows[row]} is negative or not finite. Write the rows again.")
        return loss


class _Rows(ShardReader):
    """Reads whole rows.

    Args:
      files: arrays [rows] of `dtype`.
      dtype: structured.
    """

    def __init__(
        self,
        files: Sequence[StampedFile],
        dtype: np.dtype[Any],
        max_open_files: int | None,
        remote: RemoteOptions | None,
    ) -> None:
        super().__init__(files, dtype.itemsize, max_open_files, remote=remote, whole_rows=True)
        self.dtype = dtype
        self.folder = files[0].path.rpartition("/")[0]

    def fetch(self, shards: Ints | None, rows: Ints) -> npt.NDArray[np.uint8]:
        """Row `rows[i]` of shard `shards[i]` (without `shards`, of the first) for each i: uint8 [rows, bytes]."""
        size, count = self.dtype.itemsize, len(rows)
        memory: npt.NDArray[np.uint8] = np.empty((count, size), np.uint8)
        places = list(range(0, count * size, size))
        of_shard = [0] * count if shards is None else shards.tolist()
        self.gather(of_shard, rows.tolist(), places, [size] * count, memory.reshape(-1).data)
        return memory


def _fill(buffers: list[Buffers], rows: npt.NDArray[np.uint8]) -> None:
    """Fill buffers of each row with the row's bytes."""
    for of_row, row in zip(buffers, rows, strict=False):
        begin = 0
        for view in of_row:
            view[:] = row[begin : begin + len(view)].data
            begin += len(view)


def _bytes_of_rows(array: npt.NDArray[Any]) -> list[memoryview]:
    return [row.data.cast("B") for row in array]


def _planes(memory: npt.NDArray[np.uint8], dtype: np.dtype[Any]) -> dict[str, npt.NDArray[Any]]:
    """Of rows as they stand in memory, uint8 [rows, bytes], an array of each field."""
    fields = (dtype.fields or {}).items()
    return {name: memory[:, begin : begin + plane.itemsize].view(plane.base) for name, (plane, begin, *_) in fields}
