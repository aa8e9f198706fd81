"""NpyDataSource: the arrays of row i, or of rows i, j, k at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.corpus.loss_reader import LossReader
from grain_sft.corpus.reader import ShardReader
from grain_sft.corpus.rows import RowReader
from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, FillKey, Layout, MaterializedLayout, Pieces

Element = dict[str, npt.NDArray[Any]]
"""What sources give and transforms take: arrays [L] of a row or [rows, L] of a batch."""


_BATCH_SIZES_KEPT = 8


class NpyDataSource(grain.sources.RandomAccessDataSource[Element]):
    """Rows of a layout by number, read from the token files.

    `source[i]` is row i as arrays [L]; `source.read(indices)` is many rows as arrays [rows, L], the same values in one
    gather. Keys:
      tokens: the corpus's dtype. Always a fresh copy.
      loss_mask: bool, tokens that take loss as targets: of the corpus's loss files or, without any, all.
      loss_weights: float32, how much, where the corpus has weights; `loss_mask` is then where they are not 0.
      segment_ids: int32, from 1; 0 is padding.
      positions: int32, from 0 in every segment.
    In `read`, arrays that are the same for every batch (in a window layout all but tokens and what loss files say) are
    shared between batches and read-only. Padding is the corpus's `pad_token_id`, else its EOS, else 0. To `read`, row
    `FILL_ROW` (-1) is all padding.

    Files are opened when first read. Safe in threads; pickles without its open files, so that Grain's worker
    processes open their own.

    Args:
      layout: which rows there are.
      max_open_files: at most so many files stay open; None means 1024, or less under a low `ulimit -n`.
    """

    def __init__(self, layout: Layout, *, max_open_files: int | None = None) -> None:
        self.layout = layout
        self._max_open_files = max_open_files
        corpus = layout.corpus
        self._reader = ShardReader(corpus.shards, corpus.dtype.itemsize, max_open_files)
        self._ready = RowReader(corpus, max_open_files) if isinstance(layout, MaterializedLayout) else None
        self._loss = LossReader(corpus.shards, max_open_files) if corpus.has_loss else None
        self._constants: dict[int, Element] = {}
        self._numbers: npt.NDArray[np.int32] | None = None
        self._pad = next((number for number in (corpus.pad_token_id, corpus.eos_token_id) if number is not None), 0)

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> Element:
        """Row `index`: fresh arrays [L].

        Raises:
          RowIndexError: no such row.
          CorpusFileError: its file is missing, unreadable, or not the one that was indexed.
        """
        if index == FILL_ROW and not isinstance(index, FillKey):
            raise RowIndexError(
                f"row {index} of {self.layout!r}: expected 0 to {len(self) - 1}. Rows don't count from the end."
            )
        element = self.read((index,))
        return {key: array[0] if array.flags.writeable else array[0].copy() for key, array in element.items()}

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        """Rows `indices`, in that order: arrays [rows, L].

        Raises:
          RowIndexError: an index that is no row.
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        try:
            listed = indices.tolist() if isinstance(indices, np.ndarray) else indices
            listed = [operator.index(row) for row in listed]
        except TypeError as error:
            raise RowIndexError(
                f"rows {indices!r} of {self.layout!r}: expected integers, one after the other."
            ) from error
        lowest, highest = min(listed, default=0), max(listed, default=0)
        if lowest < FILL_ROW or highest >= len(self):
            wrong = lowest if lowest < FILL_ROW else highest
            raise RowIndexError(f"row {wrong} of {self.layout!r}: expected 0 to {len(self) - 1}.")
        rows = np.array(listed, np.int64)
        if self._ready is not None and lowest != FILL_ROW:
            return self._ready.read(rows)
        length = self.layout.sequence_length
        tokens: npt.NDArray[np.unsignedinteger] = np.empty((len(rows), length), self.layout.corpus.dtype)
        if lowest != FILL_ROW:
            pieces = self.layout.pieces(rows)
            if pieces.segment is None:
                element = self._constants.get(len(rows)) or self._whole_rows(len(rows))
            else:
                element = self._segments(pieces, tokens)
            self._gather(pieces, tokens)
            if self._loss is None:
                return {"tokens": tokens, **element}
            return {"tokens": tokens, **element, **self._gather_loss(self._loss, pieces, tokens.shape)}
        filled = rows == FILL_ROW
        padded: Element = {}
        for key, array in self.read(rows[~filled]).items():
            padded[key] = np.full(tokens.shape, self._pad if key == "tokens" else 0, array.dtype)
            padded[key][~filled] = array
        return padded

    def _gather(self, pieces: Pieces, tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Copy every piece to its place in `tokens` [rows, L]."""
        places = (pieces.row * tokens.shape[1] + pieces.column) * tokens.itemsize
        sizes = pieces.length * tokens.itemsize
        out = tokens.reshape(-1).data.cast("B")
        self._reader.gather(pieces.shard.tolist(), pieces.start.tolist(), places.tolist(), sizes.tolist(), out)

    @staticmethod
    def _gather_loss(reader: LossReader, pieces: Pieces, shape: tuple[int, ...]) -> Element:
        """What the loss files say of every piece, at its place in [rows, L]."""
        places = pieces.row * shape[1] + pieces.column
        loss = reader.gather(pieces.shard, pieces.start, places, pieces.length, shape[0] * shape[1]).reshape(shape)
        return {"loss_mask": loss != 0, "loss_weights": loss} if reader.weighted else {"loss_mask": loss}

    def _segments(self, pieces: Pieces, tokens: npt.NDArray[Any]) -> Element:
        """Segments, positions and the mask of rows that hold documents; pads `tokens` where there is none.

        Rows are runs of pieces, each with a run of padding after its last: repeated in one go, not piece by piece.
        """
        count, length = tokens.shape
        assert pieces.segment is not None and pieces.position is not None
        row = pieces.row
        lasts = row.searchsorted(np.arange(count), side="right") - 1
        used = pieces.column[lasts] + pieces.length[lasts]
        place = np.arange(len(row)) + row  # of each piece among the runs; a row's padding follows its last
        runs = np.empty(len(row) + count, np.int64)
        runs[place] = pieces.length
        runs[place[lasts] + 1] = length - used
        numbers = np.zeros(len(runs), np.int32)
        numbers[place] = pieces.segment
        shifts = (runs.cumsum() - runs).astype(np.int32)  # where each run begins
        if pieces.position.any():
            shifts[place] -= pieces.position.astype(np.int32)
        segments = numbers.repeat(runs)
        positions = shifts.repeat(runs)
        np.subtract(self._counting(tokens.size), positions, out=positions)
        taken = np.ones(tokens.size, np.bool_)
        for padded, begin in zip(range(count), used.tolist(), strict=True):
            if begin < length:
                rest = slice(padded * length + begin, (padded + 1) * length)
                tokens[padded, begin:] = self._pad
                positions[rest] = 0
                taken[rest] = False
        return {
            "loss_mask": taken.reshape(tokens.shape),
            "segment_ids": segments.reshape(tokens.shape),
            "positions": positions.reshape(tokens.shape),
        }

    def _counting(self, size: int) -> npt.NDArray[np.int32]:
        """0, 1, 2, ...: kept, since a fresh array of some hundred KB costs more than what is computed from it."""
        if self._numbers is None or len(self._numbers) != size:
            self._numbers = np.arange(size, dtype=np.int32)
        return self._numbers

    def _whole_rows(self, count: int) -> Element:
        """What is the same in all batches of `count` rows of one full segment each."""
        shape = (count, self.layout.sequence_length)
        made: Element = {
            "loss_mask": np.ones(shape, np.bool_),
            "segment_ids": np.ones(shape, np.int32),
            "positions": np.tile(np.arange(shape[1], dtype=np.int32), (count, 1)),
        }
        for array in made.values():
            array.flags.writeable = False
        if len(self._constants) >= _BATCH_SIZES_KEPT:
            self._constants.clear()
        return self._constants.setdefault(count, made)

    def __getstate__(self) -> dict[str, Any]:
        return {"layout": self.layout, "max_open_files": self._max_open_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["layout"], max_open_files=state["max_open_files"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """What decides its values and nothing else: Grain compares this when it restores an iterator."""
        return f"NpyDataSource(layout={self.layout!r}, corpus={self.layout.corpus.fingerprint!r})"
