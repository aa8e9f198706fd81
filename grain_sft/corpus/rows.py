"""Ready rows: what a corpus has beside tokens and loss where its tokens are laid out as rows, and reading them.

A row is a few contiguous pieces, read as pieces of rows are (see `reader`), and widened from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.arrays import Arrays
from grain_sft.corpus.reader import ShardReader
from grain_sft.corpus.remote_options import RemoteOptions
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
      places: a file a shard: for each row its positions, its segment ids, and the segment ids of its targets, 0 where no
        loss is taken; [sequence_length] each.
      positions_dtype, segments_dtype: "uint8", "uint16" or "uint32".
      made_of: what the rows were made of, in words: corpus, layout and their fingerprints.
    """

    sequence_length: int
    places: tuple[Stored, ...]
    positions_dtype: str
    segments_dtype: str
    made_of: str

    @property
    def places_dtype(self) -> np.dtype[Any]:
        """Of a row in `places`."""
        length = self.sequence_length
        names = (
            ("positions", self.positions_dtype),
            ("segment_ids", self.segments_dtype),
            ("target_segment_ids", self.segments_dtype),
        )
        return np.dtype([(name, np.dtype(dtype).newbyteorder("<"), (length,)) for name, dtype in names])


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
        rows = corpus.rows
        self.fits_int32 = corpus.dtype.itemsize == 4  # tokens that don't are not written out
        self._tokens = _Rows(shards, np.dtype([("tokens", corpus.dtype, (length,))]), max_open_files, corpus.remote)
        self._places = _Rows(rows.places, rows.places_dtype, max_open_files, corpus.remote)
        self._weighted = corpus.has_weights
        dtype: np.dtype[Any] = np.dtype([("loss", np.float32 if self._weighted else np.uint8, (length,))])
        self._losses = losses
        self._loss = _Rows(losses, dtype, max_open_files, corpus.remote) if losses else None

    def read(self, rows: Ints, arrays: Arrays, *, only_weights: bool = False) -> tuple[Any, ...]:
        """Rows `rows`, each in range: tokens, positions, segment ids, target segment ids and loss, arrays [rows, L] made
        by `arrays`; no loss (None) where the corpus has none, and with `only_weights` where it is a mask, which the
        target segment ids hold already. Tokens are read last: they are what is copied from next.

        Raises:
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
          CorpusError: a weight that is no finite number.
        """
        shards, at = [0] * len(rows), rows
        if len(self._begins) > 1:
            shard = self._begins.searchsorted(rows, side="right") - 1
            shards, at = shard.tolist(), rows - self._begins[shard]
        places = self._places.take(shards, at, arrays, np.int32)
        loss = None
        if self._loss is not None and (self._weighted or not only_weights):
            (loss,) = self._loss.take(shards, at, arrays)
            if not self._weighted:
                loss = loss != 0
            elif not np.isfinite(loss).all():
                row = int(np.flatnonzero(~np.isfinite(loss).all(axis=1))[0])
                raise CorpusError(
                    f"{self._losses[shards[row]].path}: a weight of row {at[row]} is no finite number. Write the rows again."
                )
        return *self._tokens.take(shards, at, arrays), *places, loss


class _Rows(ShardReader):
    """Reads rows of several planes each.

    Args:
      files: arrays [rows] of `dtype`.
      dtype: structured; each of its fields is a plane of the same shape.
    """

    def __init__(
        self,
        files: Sequence[StoredFile],
        dtype: np.dtype[Any],
        max_open_files: int | None,
        remote: RemoteOptions | None,
    ) -> None:
        super().__init__(files, dtype.itemsize, max_open_files, remote=remote)
        self._row_bytes = dtype.itemsize
        self._planes: list[tuple[np.dtype[Any], slice]] = []
        for plane, begin, *_ in (dtype.fields or {}).values():
            self._planes.append((plane.base, slice(begin, begin + plane.itemsize)))

    def take(self, shards: list[int], rows: Ints, arrays: Arrays, dtype: type | None = None) -> list[npt.NDArray[Any]]:
        """Row `rows[i]` of shard `shards[i]` for each i: an array [rows, L] of each plane, made by `arrays`; as `dtype`,
        to which they are widened as they are copied."""
        size = self._row_bytes
        found = arrays.empty((len(rows), size), np.uint8, 1)
        places = list(range(0, len(rows) * size, size))
        self.gather(shards, rows.tolist(), places, [size] * len(rows), found.reshape(-1).data)
        planes = [found[:, columns].view(plane) for plane, columns in self._planes]
        if dtype is None:
            return planes
        out = [arrays.empty(plane.shape, dtype, 1) for plane in planes]
        for array, plane in zip(out, planes, strict=True):
            array[...] = plane
        return out
