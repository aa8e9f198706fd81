"""Withdrawals: documents whose tokens are padding from a step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, Pieces, checked_rows, split_documents
from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.source.withdrawn_documents import WithdrawnDocuments

if TYPE_CHECKING:
    from jaxtyping import Int64

Ints = npt.NDArray[np.int64]


class Withdrawals:
    """Documents that are withdrawn from a run, each from a step on.

    Their tokens are padding then, as at the end of a row: the padding token, segment 0, position 0, no loss. All other values
    of a row are what they were.

    Args:
      source: Source of the rows.
      documents: int64 [n], at least one, numbers of documents as a trace prints them, in [0, source.layout.num_documents).
      steps: int64 [n], step from which each is withdrawn.

    Raises:
      RowIndexError: a number that is not of a document.
      CorpusError, CorpusFileError: the documents cannot be found.
    """

    def __init__(
        self,
        source: NpyDataSource | MixtureSource,
        documents: Int64[np.ndarray, " documents"],
        steps: Int64[np.ndarray, " documents"],
    ) -> None:
        layout = source.layout
        self._source, self._layout = source, layout
        self._parts: dict[str, WithdrawnDocuments] = {}
        self._arrays = Arrays()
        unknown = np.ones(len(documents), np.bool_)
        for name, part, here, own in split_documents(layout, documents):
            unknown &= ~here
            if len(own):
                self._parts[name] = WithdrawnDocuments(part, own, steps[here])
        if unknown.any():
            expected = f"expected 0 to {layout.num_documents - 1}, the documents of the run"
            raise RowIndexError(f"withdraw: document {documents[unknown][0]}: {expected}.")
        self._steps = range(int(steps.min()), int(steps.max()))
        self._last = self._source_at(self._steps.stop)

    def source_at(self, step: int) -> RowSource:
        """Return the source as it is at `step`."""
        if step < self._steps.start:
            return self._source
        return self._last if step >= self._steps.stop else self._source_at(step)

    def _source_at(self, step: int) -> RowSource:
        sources = self._source.sources
        return self._source.with_sources(
            {name: _PaddedSource(sources[name], part, self._arrays, step) for name, part in self._parts.items()}
        )

    def spans(self, rows: Ints, step: int) -> Iterator[tuple[Ints, Ints]]:
        """Yield for each source with spans that are withdrawn at `step`: start and stop of each in the flattened `rows`, int64
        [n]."""
        length, real = self._layout.width(rows), np.flatnonzero(rows != FILL_ROW)
        for name, at, found in self._pieces(rows[real], None):
            piece, start, stop = self._parts[name].spans(found, step, length)
            row = found.row[piece]
            moved = (real[row if at is None else at[row]] - row) * length
            yield start + moved, stop + moved

    def tokens_of_pieces(self, rows: Ints, steps: Ints, pieces: Pieces) -> Ints:
        """Return the number of withdrawn tokens of each of the `pieces` of `rows`, read at `steps`, int64 [pieces]."""
        counts = np.zeros(len(pieces.row), np.int64)
        for name, at, found in self._pieces(rows, pieces):
            piece, _, count, since = self._parts[name].parts(found)
            row = found.row[piece] if at is None else at[found.row[piece]]
            count = np.where(since <= steps[row], count, 0)
            in_part = np.bincount(piece, count, len(found.row)).astype(np.int64)
            counts[slice(None) if at is None else np.flatnonzero(np.isin(pieces.row, at))] += in_part
        return counts

    def _pieces(self, rows: Ints, pieces: Pieces | None) -> Iterator[tuple[str, Ints | None, Pieces]]:
        """Yield for each source with withdrawn documents: its name, the indices of its rows in `rows` (None for all), and the
        pieces of these."""
        if "" in self._parts:
            yield "", None, self._layout.pieces(rows) if pieces is None else pieces
            return
        for name, at, own in self._layout.split(rows):
            if (part := self._parts.get(name)) is not None:
                yield name, at, part.layout.pieces(own)


class _PaddedSource(RowSource):
    """A source in whose rows the tokens of documents that are withdrawn at `step` are padding."""

    def __init__(self, source: NpyDataSource, documents: WithdrawnDocuments, arrays: Arrays, step: int) -> None:
        self.layout, self._source, self._documents = source.layout, source, documents
        self._arrays, self._step, self._pad = arrays, step, source.layout.corpus.padding_token_id

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        element = self._source.read(indices)
        spans = self._spans(indices, element["tokens"].shape[1])
        for key, array in element.items() if spans else ():
            element[key] = self._writable(array)
            flat, value = element[key].reshape(-1), self._pad if key == "tokens" else 0
            for begin, end in spans:
                flat[begin:end] = value
        return element

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """Return what `NpyDataSource.read_rows` returns. `loss` is as it was, also where `target_segment_ids` are now 0."""
        read = self._source.read_rows(indices)
        if read is None:
            return None
        length = read.inputs.shape[1]
        spans = self._spans(indices, length, read.pieces)
        if not spans:
            return read
        arrays = {name: self._writable(getattr(read, name)) for name in ReadRows._fields[:5]}
        inputs, targets, positions, segments, target_segments = (array.reshape(-1) for array in arrays.values())
        for begin, end in spans:
            first = begin - (begin % length > 0)  # the token whose target is the span's first
            inputs[begin:end] = targets[first : end - 1] = self._pad
            positions[begin:end] = segments[begin:end] = target_segments[first:end] = 0
        return read._replace(**arrays, pieces=None)  # the pieces do not show this padding

    def _spans(
        self, indices: Sequence[int] | npt.NDArray[np.integer], length: int, pieces: Pieces | None = None
    ) -> list[tuple[int, int]]:
        """Return the start and stop of each withdrawn span in the flattened rows `indices`."""
        rows, _ = checked_rows(indices, self.layout)
        if not self._documents.in_row[rows].any():  # saves the pieces of long rows
            return []
        if pieces is None:
            real = np.flatnonzero(rows != FILL_ROW)
            pieces = self.layout.pieces(rows[real])
            pieces = pieces._replace(row=real[pieces.row])
        _, start, stop = self._documents.spans(pieces, self._step, length)
        return list(zip(start.tolist(), stop.tolist(), strict=True))

    def _writable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the array, or a copy if batches share it."""
        if array.flags.writeable:
            return array
        copied = self._arrays.empty(array.shape, array.dtype)
        copied[...] = array
        return copied
