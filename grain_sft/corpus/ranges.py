"""Ranges of a corpus's tokens, counted through all shards, with their loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.loss_reader import LossReader
from grain_sft.errors import RowIndexError
from grain_sft.storage import ShardReader

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus


class RangeReader:
    """Reads tokens `start` to `stop` of all shards, one after the other. Safe in threads; keeps files open."""

    def __init__(self, corpus: Corpus) -> None:
        counts = np.array([shard.num_tokens for shard in corpus.shards], np.int64)
        self._ends: npt.NDArray[np.int64] = np.cumsum(counts)
        self._begins = self._ends - counts
        self._dtype = corpus.dtype
        self._tokens = ShardReader(corpus.shards, corpus.dtype.itemsize, remote=corpus.remote)
        self._loss = LossReader(corpus.shards, remote=corpus.remote) if corpus.has_loss else None

    def read(self, start: int, stop: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """Tokens [stop - start], and their loss; see `Corpus.read`."""
        total = int(self._ends[-1]) if len(self._ends) else 0
        if not 0 <= start <= stop <= total:
            raise RowIndexError(f"tokens {start} to {stop}: expected a range within 0 to {total}, the corpus's tokens.")
        count = stop - start
        shard = np.flatnonzero((self._ends > start) & (self._begins < stop))
        first = np.maximum(self._begins[shard], start)
        length = np.minimum(self._ends[shard], stop) - first
        at, place = first - self._begins[shard], first - start
        tokens: npt.NDArray[Any] = np.empty(count, self._dtype)
        if not count:
            return tokens, None if self._loss is None else self._loss.gather(shard, at, place, length, 0)
        width = tokens.itemsize
        places, sizes = (place * width).tolist(), (length * width).tolist()
        self._tokens.gather(shard.tolist(), at.tolist(), places, sizes, tokens.data.cast("B"))
        return tokens, None if self._loss is None else self._loss.gather(shard, at, place, length, count)
