"""Reader of corpora that store rows. One read returns the tokens, positions and segment ids of a row.

In a file, the tokens of a row are followed by its positions and segment ids: small integers, which are widened to int32.
Rows of long segments store the columns where segments end instead.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError
from grain_sft.source.arrays import Arrays, ReadRows, Stack
from grain_sft.source.segment_reader import ARRAYS, ZERO, Counting, SegmentRow
from grain_sft.storage import Buffers, RemoteOptions, ShardReader, StampedFile, activity

if TYPE_CHECKING:
    from grain_sft.corpus import Corpus

Ints = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]

_BLOCK_TOKENS = 1 << 15  # per block, so that its bytes are still in the processor's cache when they are widened


class _Block(NamedTuple):
    """Consecutive rows of a batch that are read and then widened, before the next block is read.

    Attributes:
      rows: Slice of the batch.
      size: Number of bytes of these rows in their files.
      buffers: Buffers that each row is read into.
      copied: (view of the batch's arrays, index into it, source) of each copy after the read, in this order.
      by_ends: (table of segment ends, views of the row's arrays) of each row that stores the ends of its segments.
    """

    rows: slice
    size: int
    buffers: list[Buffers]
    copied: list[tuple[Any, Any, Any]]
    by_ends: list[tuple[memoryview, SegmentRow]]


class RowReader:
    """Reader of the rows of a corpus that stores rows. Thread-safe.

    Args:
      corpus: Corpus that has `rows`.
      max_open_files: Limit of open files, as in `ShardReader`.
    """

    def __init__(self, corpus: Corpus, max_open_files: int | None = None) -> None:
        assert corpus.rows is not None
        shards, length = corpus.shards, corpus.rows.sequence_length
        self._counting = Counting(length) if corpus.rows.most_segments else None
        self._all_take_loss = not corpus.rows.segments_dtype
        self._length, self._wide = length, corpus.dtype.itemsize == 4
        self._begins: Ints = np.cumsum([0] + [shard.num_tokens // length for shard in shards])[:-1]
        self._losses = [shard.loss for shard in shards if shard.loss is not None]
        self._weighted = corpus.has_weights
        self._rows = _Rows(shards, corpus.rows.dtype(corpus.dtype), max_open_files, corpus.remote)
        loss: np.dtype[Any] = np.dtype([("loss", np.float32 if self._weighted else np.uint8, (length,))])
        self._loss = _Rows(self._losses, loss, max_open_files, corpus.remote) if self._losses else None

    def read(self, rows: Ints, arrays: Arrays, *, only_weights: bool = False) -> ReadRows:
        """Return `rows`, int64 in [0, number of rows), in arrays from `arrays`.

        Args:
          only_weights: Whether to read the loss only if it is weights, and not if it is a mask.

        Raises:
          CorpusFileError: A file is missing, unreadable, or not the one that was indexed.
          CorpusError: A weight is negative or not finite, or the segment ends of a row are invalid.
        """
        shards, count, reader = None, len(rows), self._rows
        if len(self._begins) > 1:
            shards = self._begins.searchsorted(rows, side="right") - 1
            rows = rows - self._begins[shards]
        blocks, (tokens, targets, segments, positions, target_segments) = arrays.stack(
            ARRAYS, (count, self._length), self._blocks
        )
        places = reader.places_of(shards, rows)
        if places is not None:
            files, fds, offsets = places
            if count:
                activity.doing[get_ident()] = activity.READING_ROWS, len(offsets), files[0].shard, offsets[0]
            for block in blocks:
                in_block, size, buffers, *_ = block
                try:
                    num_read = sum(map(os.preadv, fds[in_block], buffers, offsets[in_block]))
                except OSError:
                    num_read = 0
                if num_read != size:
                    reader.read_again(None if shards is None else shards[in_block], offsets[in_block], buffers)
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
        return ReadRows(tokens, targets, positions, segments, target_segments, loss)

    def _widen(self, block: _Block) -> None:
        """Fill the batch's arrays from the buffers of a block."""
        _, _, _, copied, by_ends = block
        for array, index, source in copied:
            array[index] = source
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
        """Return the blocks of a batch that has the arrays of `stack`."""
        tokens, targets, segments, positions, target_segments = stack.arrays
        count, length = tokens.shape
        size = max(1, min(count, (_BLOCK_TOKENS if self._counting is None else 2 * _BLOCK_TOKENS) // length))
        row = self._rows.dtype
        memory = Arrays().empty((size, row.itemsize), np.uint8, 1)
        planes = _planes(memory, row)
        sidecars = memory[:, planes["tokens"].nbytes // size :] if self._wide else memory
        sidecar_bytes = [each.data.cast("B") for each in sidecars]
        destinations = {"positions": positions, "segment_ids": segments, "target_segment_ids": target_segments}
        blocks = []
        for begin in range(0, count, size):
            here = slice(begin, min(begin + size, count))
            sources = {name: plane[: here.stop - begin] for name, plane in planes.items()}
            copied: list[tuple[Any, Any, Any]] = [] if self._wide else [(tokens[here], ..., sources["tokens"])]
            following = tokens[here].reshape(-1).data[1:]  # each row's last target is wrong until it is zeroed
            copied.append((targets[here].reshape(-1).data[:-1], slice(None), following))
            copied.append((targets[here, -1], ..., ZERO))
            copied += [(array[here], ..., sources[name]) for name, array in destinations.items() if name in sources]
            buffers: list[Buffers] = [(each,) for each in sidecar_bytes]
            if self._wide:
                buffers = list(zip(stack.rows[here], sidecar_bytes, strict=False))
            by_ends = []
            if self._counting is not None:
                rows = (SegmentRow(stack, number, self._counting) for number in range(here.start, here.stop))
                by_ends = list(zip((table.view(np.int64).data for table in sources["ends"]), rows, strict=False))
            blocks.append(_Block(here, (here.stop - begin) * row.itemsize, buffers, copied, by_ends))
        return blocks

    def _read_loss(self, reader: _Rows, shards: Ints | None, rows: Ints) -> npt.NDArray[Any]:
        loss = _planes(reader.fetch(shards, rows), reader.dtype)["loss"]
        if not self._weighted:
            taken: npt.NDArray[np.bool_] = loss != 0
            return taken
        if loss.size and not (loss.min() >= 0 and loss.max() < np.inf):  # both comparisons are False for NaN
            row = int(np.flatnonzero((~np.isfinite(loss) | (loss < 0)).any(axis=1))[0])
            path = self._losses[0 if shards is None else shards[row]].path
            raise CorpusError(f"{path}: a weight of row {rows[row]} is negative or not finite. Write the rows again.")
        return loss


class _Rows(ShardReader):
    """Reader of whole rows, from files that hold arrays [rows] of a structured `dtype`."""

    def __init__(
        self, files: Sequence[StampedFile], dtype: np.dtype[Any], max_open: int | None, remote: RemoteOptions | None
    ) -> None:
        super().__init__(files, dtype.itemsize, max_open, remote=remote, whole_rows=True)
        self.dtype = dtype
        self.folder = files[0].path.rpartition("/")[0]

    def fetch(self, shards: Ints | None, rows: Ints) -> _Bytes:
        """Return uint8 [rows, bytes], row `rows[i]` of shard `shards[i]` for each i. `shards` None means shard 0."""
        size, count = self.dtype.itemsize, len(rows)
        memory: _Bytes = np.empty((count, size), np.uint8)
        of_shard = [0] * count if shards is None else shards.tolist()
        self.gather(of_shard, rows.tolist(), range(0, count * size, size), [size] * count, memory.reshape(-1).data)
        return memory


def _fill(buffers: list[Buffers], rows: _Bytes) -> None:
    """Copy the bytes of each row into its buffers, one buffer after the other."""
    for of_row, row in zip(buffers, rows, strict=False):
        begin = 0
        for view in of_row:
            view[:] = row[begin : begin + len(view)].data
            begin += len(view)


def _planes(memory: _Bytes, dtype: np.dtype[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return a view of each field, by name, of `memory`: uint8 [rows, bytes], rows of a structured `dtype`."""
    fields = (dtype.fields or {}).items()
    return {name: memory[:, begin : begin + plane.itemsize].view(plane.base) for name, (plane, begin, *_) in fields}
