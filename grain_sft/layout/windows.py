"""WindowLayout: fixed windows of a token stream, as in OLMo-core's `NumpyFSLDataset` and MaxText's `olmo_grain`."""

import numpy as np

from grain_sft.arguments import as_sequence_length, check_type
from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import LeftOut, Pieces
from grain_sft.types import Ints


class WindowLayout(Layout):
    """Windows of `sequence_length` consecutive tokens of one shard. A shard's tokens after its last whole window are dropped.

    Rows are numbered shard after shard. Windows cut through documents, and every row is one segment.

    Args:
      max_target_sequence_length: Longest sequence length of a run that changes its sequence length, as in OLMo-core. It is
        a multiple of `sequence_length`. With 4096, rows of 1024 tokens are the quarters of windows of 4096 tokens. The
        sampler shuffles windows, not quarters. So the run reads the same tokens in the same order at every length. None means
        `sequence_length`.

    Raises:
      LayoutError: A length is not a positive integer, no shard fills a window, or `sequence_length` does not divide
        `max_target_sequence_length`.
    """

    kind = "windows"
    one_segment = True
    _rows_receipt = property(repr)  # the options in `__repr__` and the corpus decide the rows

    def __init__(self, corpus: Corpus, sequence_length: int, *, max_target_sequence_length: int | None = None) -> None:
        check_type("corpus", corpus, Corpus, "the result of open_corpus")
        self.corpus, self.sequence_length = corpus, as_sequence_length(sequence_length)
        name, longest = "max_target_sequence_length", max_target_sequence_length
        if longest is None:  # messages then name the option that was given
            name, longest = "sequence_length", self.sequence_length
        self.max_target_sequence_length = as_sequence_length(longest, name)
        self.chunk_size, remainder = divmod(self.max_target_sequence_length, self.sequence_length)
        if remainder:
            problem = f"sequence_length={self.sequence_length} does not divide {name}={longest}"
            raise LayoutError(f"{problem}. Give a length that does.")
        self._tokens: Ints = np.array([shard.num_tokens for shard in corpus.shards], np.int64)
        # Number of rows of each shard. Only whole windows of `max_target_sequence_length` tokens are cut into rows.
        self._counts: Ints = self._tokens // self.max_target_sequence_length * self.chunk_size
        # shard i has rows `_starts[i]` to `_ends[i] - 1` of the layout
        self._ends: Ints = np.cumsum(self._counts)
        self._starts = self._ends - self._counts
        if not self._counts.any():
            problem = f"{name}={self.max_target_sequence_length} leaves no row"
            found = f"the longest of {len(self._tokens)} shards has {self._tokens.max(initial=0)} tokens"
            found += ", and windows don't cross from one shard to the next"
            raise LayoutError(f"{problem}: {found}. Give a smaller {name}.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pieces(self, rows: Ints) -> Pieces:
        shard = self._ends.searchsorted(rows, side="right")
        start = (rows - self._starts[shard]) * self.sequence_length
        length = np.full(len(rows), self.sequence_length)
        return Pieces(np.arange(len(rows)), np.zeros(len(rows), np.int64), shard, start, length)

    def left_out(self) -> list[LeftOut]:
        shards = np.count_nonzero(self._tokens % self.max_target_sequence_length)
        tokens = self.corpus.num_tokens - len(self) * self.sequence_length
        return [(f"ends of {shards:,} files, shorter than a window", None, tokens)]

    @property
    def stream_key(self) -> str:
        return f"windows of {self.max_target_sequence_length}"  # the same for rows of every length that divides the window's

    def __repr__(self) -> str:
        whole = "" if self.chunk_size == 1 else f", max_target_sequence_length={self.max_target_sequence_length}"
        return f"WindowLayout(sequence_length={self.sequence_length}{whole}, rows={len(self)})"
