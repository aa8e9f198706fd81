"""Pieces of rows that hold documents: from ranges of the corpus's tokens to ranges of its shards."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.layout.span import Pieces, Range, Runs

Ints = npt.NDArray[np.int64]


class ShardPlaces:
    """Where the tokens of a corpus, counted through all shards, are."""

    def __init__(self, corpus: Corpus) -> None:
        counts = np.array([shard.num_tokens for shard in corpus.shards], np.int64)
        self._ends: Ints = np.cumsum(counts)
        self._begins = self._ends - counts
        self._borders = [0, *self._ends.tolist()]

    def ranges(self, documents: Sequence[int], starts: Sequence[int], lengths: Sequence[int]) -> list[Range]:
        """The spans of the segments of one row; a segment that goes on in the next shard is two.

        Args:
          documents: of each.
          starts, lengths: in the corpus's tokens.
        """
        borders = self._borders
        if len(borders) == 2:
            columns = zip(starts, lengths, documents, strict=True)
            return [(0, start, start + length, document) for start, length, document in columns]
        ranges: list[Range] = []
        for document, start, length in zip(documents, starts, lengths, strict=True):
            stop = start + length
            while start < stop:
                shard = bisect_right(borders, start) - 1
                begin, end = borders[shard], min(stop, borders[shard + 1])
                ranges.append((shard, start - begin, end - begin, document))
                start = end
        return ranges

    def runs(self, starts: list[int], lengths: list[int]) -> Runs:
        """What the segments of one row are read from, and where they end in it.

        Args:
          starts, lengths: of each, in the corpus's tokens.
        """
        ends = list(accumulate(lengths))
        if len(self._borders) == 2:
            return Runs(None, starts, ends, ends)
        parts = self.ranges(ends, starts, lengths)
        counts = (stop - start for _, start, stop, _ in parts)
        return Runs([part[0] for part in parts], [part[1] for part in parts], list(accumulate(counts)), ends)

    def pieces(self, row: Ints, column: Ints, start: Ints, length: Ints, segment: Ints) -> Pieces:
        """The pieces of segments, row after row; one that goes on in the next shard is two.

        Args:
          row, column, segment: int64 [segments], of each; segments count from 1 in every row.
          start, length: in the corpus's tokens.
        """
        position = np.zeros(len(start), np.int64)
        if len(self._ends) == 1:
            return Pieces(row, column, position, start, length, segment, position)
        shard = self._ends.searchsorted(start, side="right")
        over = start + length > self._ends[shard]
        if not over.any():
            return Pieces(row, column, shard, start - self._begins[shard], length, segment, position)
        while over.any():  # a document that was cut by a part's end: rare
            here = self._ends[shard] - start
            row, segment, position = (np.repeat(column, 1 + over) for column in (row, segment, position))
            firsts = np.flatnonzero(over) + np.arange(np.count_nonzero(over))
            start, length, shard, here = (np.repeat(column, 1 + over) for column in (start, length, shard, here))
            position[firsts + 1] += here[firsts]
            start[firsts + 1] += here[firsts]
            length[firsts + 1] -= here[firsts]
            length[firsts] = here[firsts]
            shard = self._ends.searchsorted(start, side="right")
            over = start + length > self._ends[shard]
        before = np.cumsum(length) - length
        first_of_row = np.searchsorted(row, row, side="left")
        column = before - before[first_of_row]
        return Pieces(row, column, shard, start - self._begins[shard], length, segment, position)
