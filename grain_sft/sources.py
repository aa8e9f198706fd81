"""NpyDataSource: the arrays of row i, or of rows i, j, k at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.corpus.reader import ShardReader
from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, FillKey, Layout

Element = dict[str, npt.NDArray[Any]]
"""What sources give and transforms take: arrays [L] of a row or [rows, L] of a batch."""


_BATCH_SIZES_KEPT = 8


class NpyDataSource(grain.sources.RandomAccessDataSource[Element]):
    """Rows of a layout by number, read from the token files.

    `source[i]` is row i as arrays [L]; `source.read(indices)` is many rows as arrays [rows, L], the same values in one
    gather. Keys:
      tokens: the corpus's dtype. Always a fresh copy.
      loss_mask: bool, tokens that take loss as targets.
      segment_ids: int32, from 1; 0 is padding.
      positions: int32, from 0 in every segment.
    In `read`, arrays that are the same for every batch (all but tokens, in a window layout) are shared between
    batches and read-only. To `read`, row `FILL_ROW` (-1) is all padding, and tokens 0.

    Files are opened when first read. Safe in threads; pickles without its open files, so that Grain's worker
    processes open their own.

    Args:
      layout: which rows there are.
      max_open_files: at most so many files stay open; None means 1024, or less under a low `ulimit -n`.
    """

    def __init__(self, layout: Layout, *, max_open_files: int | None = None) -> None:
        self.layout = layout
        self._max_open_files = max_open_files
        self._reader = ShardReader(layout.corpus, max_open_files)
        self._constants: dict[int, Element] = {}

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
        length = self.layout.sequence_length
        tokens: npt.NDArray[np.unsignedinteger] = np.empty((len(rows), length), self.layout.corpus.dtype)
        constant = self._constants.get(len(rows)) or self._whole_rows(len(rows))
        if lowest != FILL_ROW:
            self._gather(rows, tokens)
            return {"tokens": tokens, **constant}
        filled = rows == FILL_ROW
        tokens[~filled] = self.read(rows[~filled])["tokens"]
        masked = {key: array.copy() for key, array in constant.items()}
        for array in (tokens, *masked.values()):
            array[filled] = 0
        return {"tokens": tokens, **masked}

    def _gather(self, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.unsignedinteger]) -> None:
        """Copy every piece of `rows` to its place in `tokens` [rows, L]."""
        pieces = self.layout.pieces(rows)
        places = (pieces.row * tokens.shape[1] + pieces.column) * tokens.itemsize
        sizes = pieces.length * tokens.itemsize
        out = tokens.reshape(-1).data.cast("B")
        self._reader.gather(pieces.shard.tolist(), pieces.start.tolist(), places.tolist(), sizes.tolist(), out)

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
