"""Reader of materialized rows, which `grain-sft pack --materialize` writes.

A file has the tokens of a row, then the row's positions and segment ids as small integers, such as uint16. The reader widens
these to int32. For rows of long segments, a file has the ends of the segments instead of positions and segment ids. Ends 3 and
7 mean positions 0 1 2 0 1 2 3 and segment ids 1 1 1 2 2 2 2.

The reader reads a few rows (a block) at a time, and widens them while they are in the processor's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from grain_sft.errors import CorpusError
from grain_sft.source.arrays import Arrays, ReadRows, Stack
from grain_sft.source.segment_reader import ARRAYS, ZERO, SegmentRow
from grain_sft.storage import Buffers, ShardReader
from grain_sft.types import Array, Ints

if TYPE_CHECKING:
    from grain_sft.corpus import Corpus, LossReader

_BLOCK_TOKENS = 1 << 15
_WIDENED = {"positions": 2, "segment_ids": 3, "target_segment_ids": 4}
"""Index in `Stack.arrays` for each array of small integers in a file. The keys are in the order of the file."""


class _Block(NamedTuple):
    """Consecutive rows of a batch that are read and widened before the next block is read.

    Attributes:
      rows: Indices of the rows in the batch.
      buffers: For each row, the buffers that it is read into.
      copied: (destination, index, source) of each copy after the read, `destination[index] = source`, which may widen values.
      by_ends: (memory, views) of each row that stores the ends of its segments. The memory is int64: number of ends, then the
        ends. The views are of the row's arrays in the batch.
    """

    rows: slice
    buffers: list[Buffers]
    copied: list[tuple[Any, Any, Any]]
    by_ends: list[tuple[memoryview, SegmentRow]]


class RowReader:
    """Thread-safe reader of the rows of a corpus of materialized rows. `Corpus.rows` describes their format.

    Args:
      corpus: Corpus of materialized rows.
      loss: Reader of the corpus's loss files; None if it has none.
      max_open_files: Maximum number of row files that stay open, as in `NpyDataSource`.
    """

    def __init__(self, corpus: Corpus, loss: LossReader | None, max_open_files: int | None = None) -> None:
        assert corpus.rows is not None
        shards, self._length = corpus.shards, corpus.rows.sequence_length
        # the dtype of a stored row, and whether its tokens are as wide as those of a batch (int32), so that no copy is needed
        self._row, self._wide = corpus.rows.dtype(corpus.dtype), corpus.dtype.itemsize == 4
        # 0, 1, 2, ..., from which segments copy their positions. None unless rows store the ends of segments.
        self._counting = np.arange(self._length, dtype=np.int32).data if corpus.rows.most_segments else None
        # without loss files, rows have no `target_segment_ids`, and all tokens take loss
        self._all_take_loss = not corpus.rows.segments_dtype
        # number of the first row of each shard
        self._first_rows: Ints = np.cumsum([0] + [shard.num_tokens // self._length for shard in shards])[:-1]
        self._folder = shards[0].path.rpartition("/")[0]
        self._reader = ShardReader(shards, self._row.itemsize, max_open_files, remote=corpus.remote, whole_rows=True)
        self._loss = loss

    def read(self, rows: Ints, arrays: Arrays, *, only_weights: bool = False) -> ReadRows:
        """Return the rows with the numbers `rows`, int64 [n] in [0, number of rows), in arrays from `arrays`.

        With `only_weights`, stored loss masks are not read: `target_segment_ids` already expresses them.

        Raises:
          CorpusError: A weight is negative or not finite, or the segment ends of a row are invalid.
        """
        shards = None
        if len(self._first_rows) > 1:
            shards = self._first_rows.searchsorted(rows, side="right") - 1
            rows = rows - self._first_rows[shards]  # from here on, rows count from the start of their shard
        blocks, (tokens, targets, positions, segments, target_segments) = arrays.stack(
            ARRAYS, (len(rows), self._length), self._blocks
        )
        # for one block, `fill_rows` takes 4 % less time; if it can't read these rows, it returns False
        if len(blocks) == 1 and self._reader.fill_rows(shards, rows, blocks[0].buffers):
            self._widen(blocks[0])
        else:
            self._read_blocks(blocks, shards, rows)
        loss = None
        if self._loss is not None and (self._loss.weighted or not only_weights):
            shards = np.zeros(len(rows), np.int64) if shards is None else shards
            places, lengths = np.arange(0, tokens.size, self._length), np.full(len(rows), self._length)
            loss = self._loss.gather(shards, rows * self._length, places, lengths, tokens.size).reshape(tokens.shape)
        return ReadRows(tokens, targets, positions, segments, target_segments, loss)

    def _read_blocks(self, blocks: list[_Block], shards: Ints | None, rows: Ints) -> None:
        """Read and widen the blocks in turn. `rows` count from the start of each shard. `shards` is None for a single shard."""
        of_shard = [0] * len(rows) if shards is None else shards.tolist()
        numbers = rows.tolist()
        pieces = []
        for block in blocks:
            num_bytes = len(block.buffers) * self._row.itemsize
            pieces.append((of_shard[block.rows], numbers[block.rows], block.buffers, num_bytes))
        for _, block in zip(self._reader.read_groups(pieces), blocks, strict=True):
            self._widen(block)

    def _widen(self, block: _Block) -> None:
        """Fill the batch's arrays from a block that was read."""
        for array, index, source in block.copied:
            array[index] = source
        try:
            for table, row in block.by_ends:
                count = table[0]
                ends = table[1 : 1 + count].tolist()
                if len(ends) != count or (ends and (min(ends) < 1 or ends[0] > self._length)):
                    raise IndexError  # `fill` checks the later ends: each must be in the row, and not below the end before it
                row.fill(ends, self._all_take_loss)
        except (IndexError, ValueError) as error:
            expected = f"expected the number of ends, then the ends in ascending order, at most {self._length}"
            problem = f"{self._folder}: the segment ends of a row are damaged; {expected}"
            raise CorpusError(f"{problem}. Write the rows again.") from error

    def _blocks(self, stack: Stack) -> list[_Block]:
        """Return the blocks of the batch in `stack`. This is called once for each stack."""
        tokens, targets, *_ = stack.arrays
        count, length = tokens.shape
        # rows that store the ends of segments may have only half as many bytes in the file
        tokens_per_block = _BLOCK_TOKENS if self._counting is None else 2 * _BLOCK_TOKENS
        size = max(1, min(count, tokens_per_block // length))  # rows per block
        memory = Arrays().empty((size, self._row.itemsize), np.uint8, half=1)  # reused by all blocks
        stored = memory.view(self._row)[:, 0]  # the same memory as records: stored["positions"] is [size, L]
        # tokens of 4 bytes are read straight into the batch, and only the other values into `memory`
        num_token_bytes = stored["tokens"].nbytes // size if self._wide else 0
        row_bytes = [row[num_token_bytes:].data for row in memory]
        blocks = []
        for begin in range(0, count, size):
            rows = slice(begin, min(begin + size, count))
            stored = stored[: rows.stop - begin]  # only the last block is shorter
            buffers: list[Buffers] = [(each,) for each in row_bytes[: len(stored)]]
            copied: list[tuple[Any, Any, Any]] = []
            if self._wide:
                buffers = list(zip(stack.rows[rows], row_bytes, strict=False))
            else:
                copied.append((tokens[rows], ..., stored["tokens"]))
            # One copy shifts all rows. It puts the first token of the next row at the end of each row.
            copied.append((targets[rows].reshape(-1).data[:-1], slice(None), tokens[rows].reshape(-1).data[1:]))
            copied.append((targets[rows, -1], ..., ZERO))
            copied += [(stack.arrays[planes, rows], ..., small) for planes, small in self._small_integers(stored)]
            by_ends = []
            if self._counting is not None:
                for row, ends in enumerate(stored["ends"], begin):
                    by_ends.append((ends.view(np.int64).data, SegmentRow(stack, row, self._counting)))
            blocks.append(_Block(rows, buffers, copied, by_ends))
        return blocks

    def _small_integers(self, stored: Array) -> Iterator[tuple[slice, Array]]:
        """For each copy, yield a slice of k arrays of the stack, and the stored values to copy there, [k, rows, L].

        One copy fills arrays that are neighbours in a stored row and have the same dtype. One copy instead of three saves 2 %
        of a batch's time.
        """
        names = [name for name in _WIDENED if name in (self._row.names or ())]
        for _, group in itertools.groupby(names, lambda name: self._row[name].base):
            together = list(group)
            first, plane = stored[together[0]], _WIDENED[together[0]]
            shape, strides = (len(together), *first.shape), (first[0].nbytes, *first.strides)
            yield slice(plane, plane + len(together)), np.lib.stride_tricks.as_strided(first, shape, strides)
