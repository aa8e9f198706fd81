"""Rows of few long segments, read and made row by row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.layout import PackedLayout, PaddedLayout, Pieces
from grain_sft.layout.pieces import Runs
from grain_sft.source.arrays import Arrays, Stack
from grain_sft.source.segment_rows import ARRAYS, Counting, SegmentRow
from grain_sft.storage import ShardReader

_Int32 = npt.NDArray[np.int32]


class LongRows(NamedTuple):
    """Rows of a batch, int32 [rows, L].

    Attributes:
      inputs: the tokens; of tokens of 4 bytes the same memory.
      targets, target_segment_ids: what `ShiftTargets` makes of them where every token takes loss, if that was asked for.
      fit: int32 holds every token, as far as that was asked for.
      runs: of each row.
    """

    inputs: _Int32
    targets: _Int32
    positions: _Int32
    segment_ids: _Int32
    target_segment_ids: _Int32
    fit: bool
    runs: list[Runs]

    @property
    def pieces(self) -> Pieces:
        """What the rows consist of, without segments."""
        found: list[tuple[int, int, int, int, int]] = []
        for number, (shards, starts, stops, _) in enumerate(self.runs):
            columns = shards or [0] * len(starts), starts, [0, *stops], stops
            for shard, start, place, stop in zip(*columns, strict=False):
                found.append((number, place, shard, start, stop - place))
        return Pieces(*np.array(found, np.int64).reshape(-1, 5).T)

    @property
    def lasts(self) -> npt.NDArray[np.int64]:
        """Places of every segment's last token in the rows one after the other."""
        length = self.inputs.shape[1]
        return np.array([row * length + end - 1 for row, runs in enumerate(self.runs) for end in runs.ends], np.int64)


class _Row(NamedTuple):
    """A row's part of the memory of tokens, and of the arrays."""

    memory: memoryview
    tokens: npt.NDArray[Any]
    arrays: SegmentRow


class LongSegments:
    """Reads rows of a layout whose rows hold few long segments.

    Args:
      layout: whose tokens take 4 bytes or less.
      reader: of its corpus's tokens.
      fit: int32 is known to hold every token.
    """

    def __init__(self, layout: PackedLayout | PaddedLayout, reader: ShardReader, fit: bool) -> None:
        self.layout, self._reader, self._pad = layout, reader, layout.corpus.padding_token_id
        self._dtype, self._length = layout.corpus.dtype, layout.sequence_length
        self._wide = self._dtype.itemsize == 4
        self._fit = fit or not self._wide
        self._counting = Counting(self._length)

    def read(self, rows: npt.NDArray[np.int64], arrays: Arrays, *, shifted: bool) -> LongRows:
        """Rows `rows`, each in range, in arrays made by `arrays`; with targets if `shifted`.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        shape, reader, fit = (len(rows), self._length), self._reader, True
        (memory, views), (inputs, targets, segments, positions, target_segments) = arrays.stack(
            ARRAYS, shape, self._views
        )
        runs = list(map(self.layout.runs, rows.tolist()))
        made = LongRows(inputs, targets, positions, segments, target_segments, True, runs)
        plain, check = reader.plain, shifted and not self._fit
        if not plain:
            size, pieces = self._dtype.itemsize, made.pieces
            places = pieces.offsets(self._length) * size
            reader.gather(pieces.shard, pieces.start, places, pieces.length * size, memory)
        for (row_memory, tokens, row), (shards, starts, stops, ends) in zip(views, runs, strict=True):
            if plain:
                reader.fill_in_turn(shards, starts, stops, row_memory)
            if not ends or ends[-1] < self._length:
                tokens[ends[-1] if ends else 0 :] = self._pad
            if not self._wide:
                row.inputs[...] = tokens
            if check and np.minimum.reduce(row.inputs) < 0:
                fit = False
            row.fill(ends, shifted)
            if shifted:
                row.shift()
        if plain:
            reader.check_unchanged({shard for shards, *_ in runs for shard in shards or (0,)})
        return made if fit else made._replace(fit=False)

    def _views(self, stack: Stack) -> tuple[memoryview, list[_Row]]:
        """The bytes of all tokens, and views of each row."""
        inputs = stack.arrays[0]
        tokens = inputs.view(self._dtype) if self._wide else Arrays().empty(inputs.shape, self._dtype)
        rows = range(len(inputs))
        return tokens.reshape(-1).data.cast("B"), [
            _Row(tokens[row].data, tokens[row], SegmentRow(stack, row, self._counting)) for row in rows
        ]
