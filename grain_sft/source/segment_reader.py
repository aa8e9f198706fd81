"""Reader of rows of few long segments. It fills all arrays of a row while the row's tokens are in the processor's cache.

`Layout.row_segments` gives the segments of a row. With `Layout.pieces` instead, two rows of 32,768 tokens take 150 us, not 120
(`bench --only packed`). Arrays are copied as memoryviews, since starting a copy by numpy takes as long as copying some KB.
"""

from bisect import bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.layout import Layout
from grain_sft.source.arrays import Arrays, Int32s, ReadRows, Stack
from grain_sft.storage import Run, ShardReader

ARRAYS = 5
"""Number of arrays in the `Stack` of a `SegmentRow`: inputs, targets, segment ids, positions, segment ids of targets."""

ZERO = np.array(0, np.int32)


class Counting:
    """Numbers that rows are filled with: `positions` 0, 1, ..., int32 [L]; and segment ids `numbers` 1, 2, ... Each segment id
    is an int32 array, since numpy would make an array of a Python integer at each use, which is slow."""

    def __init__(self, length: int) -> None:
        self.positions = np.arange(length, dtype=np.int32).data
        self.numbers: list[Int32s] = []

    def extend(self, count: int) -> list[Int32s]:
        """Extend `numbers` to twice `count`, and return them."""
        self.numbers = [np.array(number, np.int32) for number in range(1, 2 * count + 1)]
        return self.numbers


class SegmentRow:
    """Views of one row's part of the arrays of a batch. `inputs`, int32 [L], is its tokens."""

    def __init__(self, stack: Stack, row: int, counting: Counting) -> None:
        inputs, targets, segments, positions, target_segments = (array[row] for array in stack.arrays)
        self.inputs, self._counting = inputs, counting
        self._shifted = targets[:-1].data, inputs[1:].data, targets.data[-1:]
        self._views = len(inputs), segments, segments.data, positions, positions.data, target_segments.data

    def fill(self, ends: list[int], take_loss: bool, before: tuple[int, int] = (0, 0)) -> None:
        """Fill positions and segment ids; padding begins at the last end.

        Args:
          ends: Column after each segment's last token, in order.
          take_loss: Whether to fill the segment ids of targets too, as if every token took loss.
          before: Result of `Layout.row_begin` for the row: number of segments before the row's first segment, and position of
            the row's first token.
        """
        length, segments, segments_data, positions, positions_data, target_segments = self._views
        counting, numbers, begin = self._counting.positions, self._counting.numbers, 0
        first, position = before
        if len(numbers) < first + len(ends):
            numbers = self._counting.extend(first + len(ends))
        for end, number in zip(ends, numbers[first:] if first else numbers):  # noqa: B905
            segments[begin:end] = number
            positions_data[begin:end] = counting[position : position + end - begin]
            begin, position = end, 0
        if begin < length:
            segments[begin:] = positions[begin:] = ZERO
        if take_loss:
            target_segments[:] = segments_data
            for end in ends:
                target_segments[end - 1] = 0

    def shift(self) -> None:
        targets, following, last = self._shifted
        targets[:] = following
        last[0] = 0


class SegmentReader:
    """Reader of the rows of a layout with `row_segments`.

    Args:
      layout: Layout of a corpus whose tokens take 4 bytes or less.
      reader: Reader of the tokens.
      fit: Whether int32 is certain to hold every token.
    """

    def __init__(self, layout: Layout, reader: ShardReader, fit: bool) -> None:
        assert layout.row_segments is not None
        self._row_segments, self._reader, self._pad = layout.row_segments, reader, layout.corpus.padding_token_id
        self._dtype, self._length = layout.corpus.dtype, layout.sequence_length
        self._wide = self._dtype.itemsize == 4
        self._borders = [0, *accumulate(shard.num_tokens for shard in layout.corpus.shards)]
        self._one_shard = len(layout.corpus.shards) == 1
        self._fit = fit or not self._wide
        self._counting = Counting(layout.first_column + self._length)
        self._row_begin = layout.row_begin

    def read(
        self, rows: npt.NDArray[np.int64], arrays: Arrays, *, shifted: bool
    ) -> tuple[ReadRows, list[list[int]], bool]:
        """Return `rows` (int64, in [0, len(layout))), the ends of the segments of each, and whether int32 holds every token, as
        far as that is checked. With `shifted`, check tokens and make targets and their segment ids, as if all tokens took loss.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        fit, check = True, shifted and not self._fit
        views, (inputs, targets, segments, positions, target_segments) = arrays.stack(
            ARRAYS, (len(rows), self._length), self._views
        )
        runs, ends_of = [], []
        for number, (memory, _, _) in zip(rows.tolist(), views, strict=True):
            starts, lengths = self._row_segments(number)
            ends = list(accumulate(lengths))
            ends_of.append(ends)
            runs.append(
                ([0] * len(ends), starts, ends, memory) if self._one_shard else self._in_shards(starts, ends, memory)
            )
        begins = [(0, 0)] * len(rows) if self._row_begin is None else map(self._row_begin, rows.tolist())
        filled = zip(self._reader.fill(runs), views, ends_of, begins)  # noqa: B905
        for _, (_, tokens, row), ends, before in filled:
            if not ends or ends[-1] < self._length:
                tokens[ends[-1] if ends else 0 :] = self._pad
            if not self._wide:
                row.inputs[...] = tokens
            if check and np.minimum.reduce(row.inputs) < 0:
                fit = False
            row.fill(ends, shifted, before)
            if shifted:
                row.shift()
        return ReadRows(inputs, targets, positions, segments, target_segments, None), ends_of, fit

    def _in_shards(self, starts: list[int], ends: list[int], memory: memoryview) -> Run:
        """Return the segments of a row, cut where shards end. `starts` are their first tokens in the corpus, `ends` the
        columns after them."""
        shards, begins, stops, place = [], [], [], 0
        for start, end in zip(starts, ends, strict=True):
            while place < end:
                shard = bisect_right(self._borders, start) - 1
                count = min(end - place, self._borders[shard + 1] - start)
                shards.append(shard)
                begins.append(start - self._borders[shard])
                start, place = start + count, place + count
                stops.append(place)
        return shards, begins, stops, memory

    def _views(self, stack: Stack) -> list[tuple[memoryview, npt.NDArray[Any], SegmentRow]]:
        """Return, for each row: the memory of its tokens, the same memory as an array, and views of the row's arrays."""
        inputs = stack.arrays[0]
        tokens = inputs.view(self._dtype) if self._wide else Arrays().empty(inputs.shape, self._dtype)
        return [(each.data, each, SegmentRow(stack, row, self._counting)) for row, each in enumerate(tokens)]
