"""WindowLayout: fixed windows of a token stream, as OLMo-core's `NumpyFSLDataset` and MaxText's `olmo_grain` cut them."""

import functools

import numpy as np

from grain_sft.arguments import as_sequence_length
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout, LeftOut
from grain_sft.layout.pieces import Ints, Pieces


class WindowLayout(Layout):
    """Non-overlapping windows of `sequence_length` tokens of each shard in turn; a shard's remainder is dropped.

    Rows are numbered through all shards in order: shard s holds `num_tokens // sequence_length` of them. Windows cut
    through documents, and every row is one segment.

    Raises:
      LayoutError: a sequence length that is not a positive integer, or that leaves no row.
    """

    kind = "windows"
    one_segment = True

    def __init__(self, corpus: Corpus, sequence_length: int) -> None:
        self.corpus, self.sequence_length = corpus, as_sequence_length(sequence_length)
        self._tokens: Ints = np.array([shard.num_tokens for shard in corpus.shards], np.int64)
        self._counts: Ints = self._tokens // self.sequence_length  # rows of each shard
        self._ends: Ints = np.cumsum(self._counts)
        self._starts = self._ends - self._counts
        if not self._counts.any():
            raise LayoutError(
                f"sequence_length={self.sequence_length} leaves no row: the longest of {len(self._tokens)} shards has "
                f"{self._tokens.max(initial=0)} tokens, and windows don't cross from one shard to the next."
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pieces(self, rows: Ints) -> Pieces:
        index, column, length = _columns(len(rows), self.sequence_length)
        shard = self._ends.searchsorted(rows, side="right")
        return Pieces(index, column, shard, (rows - self._starts[shard]) * self.sequence_length, length)

    def rows_of_documents(self, documents: Ints) -> Ints:
        self._check_documents(documents)
        starts, lengths = (column[documents] for column in self.corpus.documents)
        firsts, lasts = starts[lengths > 0], (starts + lengths)[lengths > 0] - 1
        ends = np.cumsum(self._tokens)

        def row_at(token: Ints, more: int) -> Ints:
            shard = ends.searchsorted(token, side="right")
            within = (token - (ends - self._tokens)[shard]) // self.sequence_length + more
            rows: Ints = self._starts[shard] + np.minimum(within, self._counts[shard])
            return rows

        ranges = map(np.arange, row_at(firsts, 0), row_at(lasts, 1))
        return np.unique(np.concatenate([np.zeros(0, np.int64), *ranges]))

    def left_out(self) -> list[LeftOut]:
        shards = np.count_nonzero(self._tokens % self.sequence_length)
        rest = self.corpus.num_tokens - len(self) * self.sequence_length
        return [(f"ends of {shards:,} files that fill no row", None, rest)]

    def _rows_receipt(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return f"WindowLayout(sequence_length={self.sequence_length}, rows={len(self)})"


@functools.lru_cache(maxsize=16)
def _columns(rows: int, sequence_length: int) -> tuple[Ints, ...]:
    """Return row, column and length of the pieces of `rows` windows: the same for every batch."""
    columns = (np.arange(rows), np.zeros(rows, np.int64), np.full(rows, sequence_length, np.int64))
    for column in columns:
        column.flags.writeable = False
    return columns
