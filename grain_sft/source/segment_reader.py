"""Reader of rows of few long segments, such as 4 documents of 8,000 tokens each.

The reader reads one row after another, and fills all arrays of a row while its tokens are in the processor's cache.

The reader gets the segments of a row from `Layout.row_segments`. Two rows of 32,768 tokens take 120 us; with `Layout.pieces`
instead, they would take 150 us (`bench --only packed`). Arrays are copied through memoryviews, because copies by numpy take
longer to begin.
"""

import itertools
from bisect import bisect_right

import numpy as np

from grain_sft.layout import Layout
from grain_sft.source.arrays import Arrays, ReadRows, Stack
from grain_sft.storage import RowPieces, ShardReader
from grain_sft.types import Array, Ints

ARRAYS = 5  # in the `Stack` of a `SegmentRow`: inputs, targets, positions, segment ids, segment ids of targets

ZERO, *_IDS = (np.array(number, np.int32) for number in range(257))
"""0, and the first segment ids. With ints instead of arrays, batches of long segments take 2 % longer."""


class SegmentRow:
    """One row of a `Stack`, as views of its arrays.

    Example of a row of 8 columns, with two segments of 3 and 4 tokens and one column of padding:

      inputs                 a b c d e f g 0
      targets                b c d e f g 0 0
      positions              0 1 2 0 1 2 3 0
      segment ids            1 1 1 2 2 2 2 0
      segment ids of targets 1 1 0 2 2 2 0 0

    Args:
      stack, row: Arrays of the batch, and number of the row in them.
      counting: Memory of int32 [L], the positions 0, 1, 2, ...
      tokens: Array for the row's tokens in the corpus's dtype, [L]. None means `inputs`.

    Attributes:
      inputs: int32 [L], tokens.
      tokens: [L], tokens in the corpus's dtype. Tokens of 4 bytes share the memory of `inputs`.
      memory: Memory of `tokens`.
    """

    def __init__(self, stack: Stack, row: int, counting: memoryview, tokens: Array | None = None) -> None:
        self.inputs, targets, positions, segments, target_segments = (array[row] for array in stack.arrays)
        self.tokens = self.inputs if tokens is None else tokens
        self.memory = self.tokens.data
        self._first_targets, self._last_target = targets[:-1].data, targets[-1:].data
        self._next_inputs = self.inputs[1:].data
        # with an attribute for each view, a batch takes 0.9 % longer (`bench --only packed`)
        self._views = len(targets), counting, segments, segments.data, positions, positions.data, target_segments.data

    def fill(self, ends: list[int], take_loss: bool) -> None:
        """Fill positions and segment ids. The columns after the last segment are padding.

        Args:
          ends: Column after each segment's last token, in order.
          take_loss: Whether to fill the segment ids of targets too, as if every token took loss.
        """
        length, counting, segments, segments_data, positions, positions_data, target_segments = self._views
        begin = 0
        ids = _IDS if len(ends) <= len(_IDS) else range(1, len(ends) + 1)
        for segment_id, end in zip(ids, ends):  # noqa: B905
            segments[begin:end] = segment_id
            begin = end
        if begin < length:
            segments[begin:] = positions[begin:] = ZERO
        if take_loss:
            target_segments[:] = segments_data
        begin = 0
        # a loop of its own, because `target_segments` is filled faster while the segment ids are in the cache
        for end in ends:
            positions_data[begin:end] = counting[: end - begin]
            if take_loss:
                target_segments[end - 1] = 0
            begin = end

    def shift(self) -> None:
        """Fill the targets: the next input for each column, and 0 for the last column."""
        self._first_targets[:] = self._next_inputs
        self._last_target[0] = 0


class SegmentReader:
    """Reader of the rows of a layout that has `row_segments`, and tokens of at most 4 bytes.

    Args:
      layout, reader: Layout of the rows, and reader of the corpus's token files.
      fit: Whether every token of the corpus is known to fit into int32.
    """

    def __init__(self, layout: Layout, reader: ShardReader, fit: bool) -> None:
        assert layout.row_segments is not None
        self._row_segments, self._reader, self._pad = layout.row_segments, reader, layout.corpus.padding_token_id
        self._dtype, self._length = layout.corpus.dtype, layout.sequence_length
        self._wide = self._dtype.itemsize == 4
        self._borders = layout.corpus.shard_borders.tolist()
        self._fits_int32 = fit or not self._wide
        self._counting = np.arange(self._length, dtype=np.int32).data

    def read(self, rows: Ints, arrays: Arrays, *, shifted: bool) -> tuple[ReadRows, list[list[int]], bool]:
        """Read rows. Return them, the ends of each row's segments, and whether all tokens fit into int32.

        Args:
          rows: int64 [n], row numbers in [0, len(layout)).
          arrays: Allocator of the batch.
          shifted: Whether to make targets and their segment ids, as if all tokens took loss. Without `shifted`, tokens are not
            checked, and the third result is True.
        """
        fit, check = True, shifted and not self._fits_int32
        batch_rows, stacked = arrays.stack(ARRAYS, (len(rows), self._length), self._rows)
        inputs, targets, positions, segments, target_segments = stacked
        row_pieces, row_ends = [], []
        for number, row in zip(rows.tolist(), batch_rows, strict=True):
            starts, lengths = self._row_segments(number)
            ends = list(itertools.accumulate(lengths))
            row_ends.append(ends)
            row_pieces.append(self._in_shards(starts, ends, row.memory))
        # `ShardReader.fill` yields after each row
        for _, row, ends in zip(self._reader.fill(row_pieces), batch_rows, row_ends):  # noqa: B905
            padding_begin = ends[-1] if ends else 0
            if padding_begin < self._length:
                row.tokens[padding_begin:] = self._pad
            if not self._wide:
                row.inputs[...] = row.tokens
            if check and np.minimum.reduce(row.inputs) < 0:  # a uint32 of 2**31 or more
                fit = False
            row.fill(ends, shifted)
            if shifted:
                row.shift()
        return ReadRows(inputs, targets, positions, segments, target_segments, None), row_ends, fit

    def _in_shards(self, starts: list[int], ends: list[int], memory: memoryview) -> RowPieces:
        """Return the segments of a row as pieces to read into `memory`. A segment in several shards becomes one piece in each.

        `starts` are the segments' first tokens, as indices into the corpus. `ends` are the columns after their last tokens.
        """
        if len(self._borders) == 2:  # one shard
            return [0] * len(ends), starts, ends, memory
        shards, firsts, stops, column = [], [], [], 0
        for start, end in zip(starts, ends, strict=True):
            while column < end:
                shard = bisect_right(self._borders, start) - 1
                count = min(end - column, self._borders[shard + 1] - start)
                shards.append(shard)
                firsts.append(start - self._borders[shard])
                start, column = start + count, column + count
                stops.append(column)
        return shards, firsts, stops, memory

    def _rows(self, stack: Stack) -> list[SegmentRow]:
        """Return the rows of the batch in `stack`. `Arrays.stack` calls this once for each stack."""
        inputs = stack.arrays[0]
        tokens = inputs.view(self._dtype) if self._wide else Arrays().empty(inputs.shape, self._dtype)
        return [SegmentRow(stack, row, self._counting, each) for row, each in enumerate(tokens)]
