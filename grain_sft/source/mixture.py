"""MixtureSource: rows of several sources as arrays with the same keys and dtypes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from grain_sft.arguments import as_objects, check_type
from grain_sft.layout import MixtureLayout, checked_rows
from grain_sft.source.arrays import Element
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.types import Integers


class MixtureSource(RowSource):
    """Rows of several sources by number: first all rows of the first source, then all rows of the second, and so on.

    Every row has the keys of `NpyDataSource`. `tokens` have the widest dtype of all sources. If any source has `loss_weights`,
    all rows have them. In rows of a source without weights, the weight of a token is 1 if the token takes loss, else 0. Each
    source pads its rows with its own padding token. The row `FILL_ROW` (-1), which is all padding, is read from the first
    source.

    Args:
      sources: Sources by name. All sources have the same sequence length.

    Raises:
      LayoutError: The sequence lengths differ.
    """

    def __init__(self, sources: Mapping[str, NpyDataSource]) -> None:
        check_type("sources", sources, Mapping, "NpyDataSources by name")
        as_objects("sources", sources.values(), RowSource)  # type: ignore[type-abstract]
        self.sources = dict(sources)
        self._readers: Mapping[str, RowSource] = dict(sources)  # others than `sources` only in a copy by `with_sources`
        self.layout = MixtureLayout({name: source.layout for name, source in self.sources.items()})
        corpus = self.layout.corpus
        self._dtypes: dict[str, npt.DTypeLike] = {"tokens": corpus.dtype, "loss_mask": np.bool_}
        self._dtypes |= {"segment_ids": np.int32, "positions": np.int32}
        if corpus.has_weights:
            self._dtypes["loss_weights"] = np.float32

    def read(self, indices: Sequence[int] | Integers) -> Element:
        """Return the rows `indices`, as `RowSource.read`."""
        rows, _ = checked_rows(indices, self.layout)
        shape = len(rows), self.layout.sequence_length
        batch = {key: np.empty(shape, dtype) for key, dtype in self._dtypes.items()}
        for name, indices_in_batch, rows_of_source in self.layout.split(rows):
            element = self._readers[name].read(rows_of_source)
            for key, array in batch.items():
                # the mask of a source without `loss_weights` becomes weights 1 and 0
                array[indices_in_batch] = element.get(key, element["loss_mask"])
        return batch

    def with_sources(self, sources: Mapping[str, RowSource]) -> RowSource:
        """Return a copy of the mixture that reads the named sources' rows from `sources`."""
        changed = copy.copy(self)
        changed._readers = {**self.sources, **sources}
        return changed

    def columns(self, start: int, stop: int) -> MixtureSource:
        """Return the source of columns [start, stop) of the same rows, as `NpyDataSource.columns`."""
        return type(self)({name: source.columns(start, stop) for name, source in self.sources.items()})

    def __repr__(self) -> str:
        """Return all that decides the values. Grain compares this text when it restores an iterator."""
        return f"MixtureSource({self.sources!r})"
