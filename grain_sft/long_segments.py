"""Rows of few long segments, read and made row by row: while a row is in the processor's cache, all of it is made."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.arrays import Arrays, Stack
from grain_sft.corpus.reader import ShardReader
from grain_sft.layout import Layout, Pieces
from grain_sft.layout.span import Range

_Int32 = npt.NDArray[np.int32]


class LongRows(NamedTuple):
    """Rows of a batch, int32 [rows, L].

    Attributes:
      inputs: the tokens; of tokens of 4 bytes the same memory.
      targets, target_segment_ids: what `ShiftTargets` makes of them where every token takes loss, if that was asked for.
      fit: int32 holds every token, as far as that was asked for.
      ranges: of each row.
      ends: of each row, places of its segments' last tokens.
    """

    inputs: _Int32
    targets: _Int32
    positions: _Int32
    segment_ids: _Int32
    target_segment_ids: _Int32
    fit: bool
    ranges: list[list[Range]]
    ends: list[list[int]]

    @property
    def pieces(self) -> Pieces:
        """What the rows consist of, without segments."""
        row: list[int] = []
        column: list[int] = []
        for number, of_row in enumerate(self.ranges):
            place = 0
            for _, start, stop, _ in of_row:
                row.append(number)
                column.append(place)
                place += stop - start
        ranges = [each for of_row in self.ranges for each in of_row]
        columns = (row, column, [r[0] for r in ranges], [r[1] for r in ranges], [r[2] - r[1] for r in ranges])
        return Pieces(*(np.array(each, np.int64) for each in columns))

    @property
    def lasts(self) -> npt.NDArray[np.int64]:
        """Places of every segment's last token in the rows one after the other."""
        length = self.inputs.shape[1]
        return np.array([row * length + end for row, ends in enumerate(self.ends) for end in ends], np.int64)


class _Row(NamedTuple):
    """Views of a row's part of the arrays, and of their memory."""

    bytes: memoryview
    tokens: npt.NDArray[Any]
    inputs: _Int32
    following: _Int32  # inputs but for the first
    targets: _Int32  # but for the last
    segments: _Int32
    positions: _Int32
    target_segments: _Int32


class LongSegments:
    """Reads rows of a layout whose rows hold few long segments.

    Args:
      layout: whose tokens take 4 bytes or less.
      reader: of its corpus's tokens.
    """

    def __init__(self, layout: Layout, reader: ShardReader) -> None:
        self._layout, self._reader, self._pad = layout, reader, layout.corpus.padding_token_id
        self._dtype, self._length = layout.corpus.dtype, layout.sequence_length
        self._wide = self._dtype.itemsize == 4
        self._counting = np.arange(self._length, dtype=np.int32)

    def read(self, rows: npt.NDArray[np.int64], arrays: Arrays, *, shifted: bool) -> LongRows:
        """Rows `rows`, each in range, in arrays made by `arrays`; with targets if `shifted`.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        shape, plain, fit = (len(rows), self._length), self._reader.plain, True
        (memory, views), (inputs, targets, segments, positions, target_segments) = arrays.stack(5, shape, self._views)
        ranges = [self._layout.ranges(row) for row in rows.tolist()]
        ends: list[list[int]] = []
        made = LongRows(inputs, targets, positions, segments, target_segments, True, ranges, ends)
        if not plain:
            size, pieces = self._dtype.itemsize, made.pieces
            places = pieces.places(self._length) * size
            self._reader.gather(pieces.shard, pieces.start, places, pieces.length * size, memory)
        for row, of_row in zip(views, ranges, strict=True):
            lasts = self._fill(row, of_row, plain)
            ends.append(lasts)
            if not self._wide:
                row.inputs[...] = row.tokens
            if shifted:
                if self._wide and np.minimum.reduce(row.inputs) < 0:
                    fit = False
                row.targets[...] = row.following
                row.target_segments[...] = row.segments
                row.target_segments[lasts] = 0
        if plain:
            self._reader.look({each[0] for of_row in ranges for each in of_row})
        targets[:, -1] = 0
        return made if fit else made._replace(fit=False)

    def _fill(self, row: _Row, ranges: list[Range], plain: bool) -> list[int]:
        """Fill the row's segments and positions and, if the files are plain, its tokens. Returns where segments end."""
        size, counting = self._dtype.itemsize, self._counting
        segments, positions = row.segments, row.positions
        place = segment = position = 0
        document = None
        lasts: list[int] = []
        parts = []
        for shard, start, stop, of_document in ranges:
            count = stop - start
            end = place + count
            if of_document == document:  # it goes on in the next shard
                lasts.pop()
            else:
                segment, position, document = segment + 1, 0, of_document
            parts.append((shard, start, place * size, count * size))
            segments[place:end] = segment
            positions[place:end] = counting[position : position + count]
            lasts.append(end - 1)
            position += count
            place = end
        if plain:
            self._reader.fill(parts, row.bytes)
        if place < self._length:
            row.tokens[place:], segments[place:], positions[place:] = self._pad, 0, 0
        return lasts

    def _views(self, stack: Stack) -> tuple[memoryview, list[_Row]]:
        """The bytes of all tokens, and views of each row."""
        inputs, targets, segments, positions, target_segments = stack.arrays
        tokens = inputs.view(self._dtype) if self._wide else Arrays().empty(inputs.shape, self._dtype)
        memory, size = tokens.reshape(-1).data.cast("B"), self._length * self._dtype.itemsize
        return memory, [
            _Row(
                memory[row * size : (row + 1) * size],
                tokens[row],
                inputs[row],
                inputs[row, 1:],
                targets[row, :-1],
                segments[row],
                positions[row],
                target_segments[row],
            )
            for row in range(len(inputs))
        ]
