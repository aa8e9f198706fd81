"""A layout of the plugin: windows that overlap."""

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.layout import Layout, Pieces


class OverlappingWindows(Layout):
    """Windows of each shard that begin every `stride` tokens.

    Args:
      corpus: Corpus whose shards are cut.
      sequence_length: Tokens of a row.
      stride: Distance in tokens between the starts of two windows.
    """

    one_segment = True

    def __init__(self, corpus: Corpus, sequence_length: int, *, stride: int = 8) -> None:
        self.corpus, self.sequence_length, self.stride = corpus, sequence_length, stride
        counts = [max(0, (shard.num_tokens - sequence_length) // stride + 1) for shard in corpus.shards]
        self._ends = np.cumsum(counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def pieces(self, rows: np.ndarray) -> Pieces:
        shard = self._ends.searchsorted(rows, side="right")
        first = np.concatenate([[0], self._ends])[shard]
        numbers, zeros = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        return Pieces(numbers, zeros, shard, (rows - first) * self.stride, zeros + self.sequence_length)
