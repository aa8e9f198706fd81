"""WindowLayout: fixed windows of a token stream, as OLMo-core's `NumpyFSLDataset` and MaxText's `olmo_grain` cut them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout, LeftOut
from grain_sft.layout.pieces import Ints, Pieces


class WindowLayout(Layout):
    """Non-overlapping windows of `sequence_length` tokens of each shard in turn; a shard's remainder is dropped.

    Rows are numbered through all shards in order: shard s holds `num_tokens // sequence_length` of them. Windows cut
    through documents, and every row is one segment.

    Raises:
      LayoutError: a sequence length that is no positive integer, or that leaves no row.
    """

    kind = "windows"
    one_segment = True

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        if (
            isinstance(sequence_length, bool)
            or not isinstance(sequence_length, int | np.integer)
            or sequence_length < 1
        ):
            raise LayoutError(f"sequence_length={sequence_length!r}: expected a positive number of tokens.")
        self.corpus = corpus
        self.sequence_length = int(sequence_length)
        counts = np.array([shard.num_tokens // self.sequence_length for shard in corpus.shards], np.int64)
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts)  # rows up to and with each shard
        self._starts = self._ends - counts
        if not len(counts) or not self._ends[-1]:
            longest = max((shard.num_tokens for shard in corpus.shards), default=0)
            raise LayoutError(
                f"sequence_length={self.sequence_length} leaves no row: the longest of {len(counts)} shards has "
                f"{longest} tokens, and windows don't cross from one shard to the next."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pieces(self, rows: npt.NDArray[np.int64]) -> Pieces:
        """One piece for each of `rows` (int64 [rows])."""
        at, column, length = _columns(len(rows), self.sequence_length)
        shard = self._ends.searchsorted(rows, side="right")
        return Pieces(at, column, shard, (rows - self._starts[shard]) * self.sequence_length, length)

    def rows_of_documents(self, documents: Ints) -> Ints:
        self._check_documents(documents)
        starts, lengths = (column[documents] for column in self.corpus.documents)
        length, begin, first = self.sequence_length, 0, 0
        found = [np.zeros(0, np.int64)]
        for shard in self.corpus.shards:
            rows = shard.num_tokens // length
            low = np.maximum(starts - begin, 0) // length
            high = np.minimum(-(-(starts + lengths - begin) // length), rows)
            found += [np.arange(a, b) + first for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]
            begin, first = begin + shard.num_tokens, first + rows
        return np.unique(np.concatenate(found))

    def left_out(self) -> list[LeftOut]:
        shards = sum(shard.num_tokens % self.sequence_length != 0 for shard in self.corpus.shards)
        rest = self.corpus.num_tokens - len(self) * self.sequence_length
        return [(f"ends of {shards:,} files that fill no row", None, rest)]

    def _rows_receipt(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"WindowLayout(sequence_length={self.sequence_length}, rows={len(self)})"


@functools.lru_cache(maxsize=16)
def _columns(rows: int, sequence_length: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Row, column and length of the pieces of so many windows: the same for every batch."""
    columns = (np.arange(rows), np.zeros(rows, np.int64), np.full(rows, sequence_length, np.int64))
    for column in columns:
        column.flags.writeable = False
    return columns
