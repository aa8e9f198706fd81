"""Ready rows: what a corpus has beside tokens and loss where its tokens are laid out as rows, and reading them.

A row is a few contiguous copies, widened as they are made. They are made from maps of the files, whose sizes are looked
at before each batch; of a remote file, from what is fetched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.arrays import empty_apart
from grain_sft.corpus.reader import ShardReader
from grain_sft.corpus.stored import Stored, StoredFile
from grain_sft.errors import CorpusError

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class ReadyRows:
    """Rows on disk.

    Attributes:
      sequence_length: of every row. A shard holds whole rows.
      places: a file a shard: `places_dtype` [rows, 2, sequence_length], positions and then segment ids of each row.
      places_dtype: "uint16" or "uint32".
      made_of: what the rows were made of, in words: corpus, layout and their fingerprints.
    """

    sequence_length: int
    places: tuple[Stored, ...]
    places_dtype: str
    made_of: str


class RowReader:
    """Reads rows of a corpus that has them ready. Safe in threads.

    Args:
      corpus: one with `rows`.
      max_open_files: as in ShardReader.
    """

    def __init__(self, corpus: Corpus, max_open_files: int | None = None) -> None:
        assert corpus.rows is not None
        length, shards = corpus.rows.sequence_length, corpus.shards
        losses = [shard.loss for shard in shards if shard.loss is not None]
        self._length, self._dtype = length, corpus.dtype
        self._begins: Ints = np.cumsum([0] + [shard.num_tokens // length for shard in shards])[:-1]
        self._tokens = _Rows(shards, corpus.dtype, (length,), max_open_files)
        self._places = _Rows(corpus.rows.places, np.dtype(corpus.rows.places_dtype), (2, length), max_open_files)
        self._weighted = corpus.has_weights
        dtype: np.dtype[Any] = np.dtype(np.float32 if self._weighted else np.uint8)
        self._losses = losses
        self._loss = _Rows(losses, dtype, (length,), max_open_files) if losses else None

    def read(self, rows: Ints) -> dict[str, npt.NDArray[Any]]:
        """Rows `rows`, each in range: arrays [rows, L], as `NpyDataSource.read` gives them.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
          CorpusError: a weight that is no finite number.
        """
        shard = self._begins.searchsorted(rows, side="right") - 1
        shards, at = shard.tolist(), rows - self._begins[shard]
        tokens = self._tokens.take(shards, at)
        positions, segments = self._places.widened(shards, at)
        if self._loss is None:
            return {"tokens": tokens, "loss_mask": segments != 0, "segment_ids": segments, "positions": positions}
        loss = self._loss.take(shards, at)
        element = {"tokens": tokens, "loss_mask": loss != 0, "segment_ids": segments, "positions": positions}
        if not self._weighted:
            return element
        if not np.isfinite(loss).all():
            row = int(np.flatnonzero(~np.isfinite(loss).all(axis=1))[0])
            raise CorpusError(
                f"{self._losses[shards[row]].path}: a weight of row {at[row]} is no finite number. Write the rows again."
            )
        return {**element, "loss_weights": loss}


class _Rows(ShardReader):
    """Reads rows of one dtype and shape.

    Args:
      files: arrays [rows, *shape] of `dtype`.
    """

    def __init__(
        self, files: Sequence[StoredFile], dtype: np.dtype[Any], shape: tuple[int, ...], max_open_files: int | None
    ) -> None:
        super().__init__(files, dtype.itemsize, max_open_files)
        self._dtype, self._shape = dtype, shape

    def take(self, shards: list[int], rows: Ints) -> npt.NDArray[Any]:
        """Row `rows[i]` of shard `shards[i]` for each i: [rows, *shape]."""
        arrays = self._arrays(shards)
        if arrays is None:
            return self._fetch(shards, rows)
        out = empty_apart((len(rows), *self._shape), self._dtype)  # rows of whole pages begin at one, in a map
        if len(arrays) == 1:  # one call; "clip" has it write to `out` itself
            arrays[shards[0]].take(rows, 0, out, "clip")
            return out
        for at, shard, row in zip(range(len(rows)), shards, rows.tolist(), strict=True):
            out[at] = arrays[shard][row]
        return out

    def widened(self, shards: list[int], rows: Ints) -> npt.NDArray[np.int32]:
        """The same as int32, the first axis of `shape` before that of the rows; widened as it is copied."""
        arrays = self._arrays(shards)
        if arrays is None:
            return np.ascontiguousarray(self._fetch(shards, rows).swapaxes(0, 1), np.int32)
        out = np.empty((self._shape[0], len(rows), *self._shape[1:]), np.int32)
        for at, shard, row in zip(range(len(rows)), shards, rows.tolist(), strict=True):
            out[:, at] = arrays[shard][row]
        return out

    def _arrays(self, shards: list[int]) -> dict[int, npt.NDArray[Any]] | None:
        """Maps of these shards; None where there are none: remote files, or more than may be open."""
        distinct = set(shards)
        if self._remote or 2 * len(distinct) > self._max_open_files:  # a mapped file has two descriptors
            return None
        return {shard: self._array(shard) for shard in distinct}

    def _array(self, shard: int) -> npt.NDArray[Any]:
        file = self._open.get(shard) or self._open_file(shard)
        if not file.mapped:
            with self._lock:
                self._make_room(1, file)
        array: npt.NDArray[Any] = np.frombuffer(file.view(), self._dtype, offset=file.shard.data_offset)
        return array.reshape(-1, *self._shape)

    def _fetch(self, shards: list[int], rows: Ints) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = np.empty((len(rows), *self._shape), self._dtype)
        count = int(np.prod(self._shape))
        size = count * self._dtype.itemsize
        places = [at * size for at in range(len(rows))]
        self.gather(shards, (rows * count).tolist(), places, [size] * len(rows), found.reshape(-1).data.cast("B"))
        return found
