"""Loss of gathered tokens: mask or weights, read from loss files as tokens are from shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.loss import IGNORED, KINDS, LossFile
from grain_sft.corpus.shard import Shard
from grain_sft.errors import CorpusError
from grain_sft.storage import RemoteOptions, ShardReader

Ints = npt.NDArray[np.int64]


class LossReader:
    """Reads the loss of a corpus's tokens. Shards without a loss file take loss on every token.

    Args:
      shards: of the corpus.
      max_open_files, scattered, remote: as in ShardReader.

    Attributes:
      weighted: some shard has weights, and so all have.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        max_open_files: int | None = None,
        *,
        scattered: bool = False,
        remote: RemoteOptions | None = None,
    ) -> None:
        kinds = [None if shard.loss is None else shard.loss.kind for shard in shards]
        self.weighted = "float32" in kinds
        self._shards = shards
        self._sets = [
            _LossSet(kind, shards, max_open_files, scattered, remote)
            for kind in dict.fromkeys(kinds)
            if kind is not None
        ]
        self._uniform = len(self._sets) == 1 and None not in kinds

    def gather(self, shard: Ints, start: Ints, place: Ints, length: Ints, count: int) -> npt.NDArray[Any]:
        """Bool or float32 [count]: at `place`, `length` values of `shard` from token `start` on; elsewhere no loss.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
          CorpusError: a weight that is negative or not finite.
        """
        if self._uniform:
            return self._sets[0].gather(shard, start, place, length, count)
        out: npt.NDArray[Any] = np.zeros(count, np.float32 if self.weighted else np.bool_)
        left = np.ones(len(shard), np.bool_)
        for files in self._sets:
            mine = files.number[shard] >= 0
            left &= ~mine
            out = np.add(out, files.gather(shard[mine], start[mine], place[mine], length[mine], count), dtype=out.dtype)
        for first, size in zip(place[left].tolist(), length[left].tolist(), strict=True):
            out[first : first + size] = 1
        return out


class _LossSet:
    """The loss files of one kind."""

    def __init__(
        self,
        kind: str,
        shards: Sequence[Shard],
        max_open_files: int | None,
        scattered: bool,
        remote: RemoteOptions | None,
    ) -> None:
        found: list[LossFile] = []
        self.number: Ints = np.full(len(shards), -1, np.int64)  # of each shard's file in `found`
        for number, shard in enumerate(shards):
            if shard.loss is not None and shard.loss.kind == kind:
                self.number[number] = len(found)
                found.append(shard.loss)
        self._kind, self._files = kind, found
        self._reader = ShardReader(found, KINDS[kind].itemsize, max_open_files, scattered=scattered, remote=remote)

    def gather(self, shard: Ints, start: Ints, place: Ints, length: Ints, count: int) -> npt.NDArray[Any]:
        dtype = KINDS[self._kind]
        raw: npt.NDArray[Any] = np.full(count, IGNORED if self._kind == "labels" else 0, dtype)
        numbers = self.number[shard]
        self._reader.gather(numbers, start, place * dtype.itemsize, length * dtype.itemsize, raw.data.cast("B"))
        if self._kind != "float32":
            taken: npt.NDArray[np.bool_] = raw != (IGNORED if self._kind == "labels" else 0)
            return taken
        if raw.size and not (raw.min() >= 0 and raw.max() < np.inf):  # both are false for NaN
            at = int(np.flatnonzero(~(raw >= 0) | (raw == np.inf))[0])
            piece = int(np.flatnonzero((place <= at) & (at < place + length))[0])
            token = int(start[piece] + at - place[piece])
            raise CorpusError(
                f"{self._files[numbers[piece]].path}: the weight of token {token} is {raw[at]}; expected a finite number, 0 or "
                "more. Prepare the corpus again."
            )
        return raw
