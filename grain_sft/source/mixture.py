"""MixtureSource: the arrays of rows of several sources, in one set of keys and dtypes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.layout import FILL_ROW, MixtureLayout, checked_record, checked_rows
from grain_sft.source.arrays import Element
from grain_sft.source.npy import NpyDataSource

_DTYPES: dict[str, npt.DTypeLike] = {
    "loss_mask": np.bool_,
    "segment_ids": np.int32,
    "positions": np.int32,
    "loss_weights": np.float32,
}


class MixtureSource(grain.sources.RandomAccessDataSource[Element]):
    """Rows of several sources by number: first all of the first, then all of the second, and so on.

    Keys and dtypes are those of `NpyDataSource`, the same for every row: `tokens` in the widest dtype of all sources, and
    `loss_weights` where any source has them (1 for a token that takes loss in a source that has none). Padding is each
    source's own; a `FILL_ROW` is padded as the first source pads.

    Args:
      sources: by name, of one sequence length.

    Raises:
      LayoutError: sequence lengths that differ.
    """

    def __init__(self, sources: Mapping[str, NpyDataSource]) -> None:
        self.sources = dict(sources)
        self.layout = MixtureLayout({name: source.layout for name, source in self.sources.items()})
        self._first = next(iter(self.sources.values()))
        self._keys = ["tokens", "loss_mask", "segment_ids", "positions"]
        if self.layout.corpus.has_weights:
            self._keys.append("loss_weights")

    def __len__(self) -> int:
        return len(self.layout)

    def __getitem__(self, index: int) -> Element:
        """Row `index`: fresh arrays [L].

        Raises:
          RowIndexError: no such row.
          CorpusFileError: its file is missing, unreadable, or not the one that was indexed.
        """
        return {key: array[0] for key, array in self.read((checked_record(index, self.layout),)).items()}

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        """Rows `indices`, in that order: arrays [rows, L].

        Raises:
          RowIndexError: an index that is no row.
          CorpusFileError: a file is missing, unreadable, or not the one that was indexed.
        """
        rows, _ = checked_rows(indices, self.layout)
        batch = {key: np.empty((len(rows), self.layout.sequence_length), self._dtype(key)) for key in self._keys}
        filled = np.flatnonzero(rows == FILL_ROW)
        if len(filled):
            self._put(batch, filled, self._first.read(np.full(len(filled), FILL_ROW, np.int64)))
        real = np.flatnonzero(rows != FILL_ROW)
        for name, at, own in self.layout.split(rows[real]):
            self._put(batch, real[at], self.sources[name].read(own))
        return batch

    def _dtype(self, key: str) -> npt.DTypeLike:
        return self.layout.corpus.dtype if key == "tokens" else _DTYPES[key]

    def _put(self, batch: Element, at: npt.NDArray[np.int64], element: Element) -> None:
        """Put rows of one source where they belong in a batch."""
        for key in self._keys:
            batch[key][at] = element["loss_mask"] if key not in element else element[key]

    def __getstate__(self) -> dict[str, Any]:
        return {"sources": self.sources}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["sources"])  # type: ignore[misc]

    def __repr__(self) -> str:
        """What decides its values and nothing else: Grain compares this when it restores an iterator."""
        return f"MixtureSource({self.sources!r})"
