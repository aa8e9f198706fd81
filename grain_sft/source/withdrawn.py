"""Withdrawals: documents whose tokens are padding from a step on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, Pieces, checked_rows, split_documents
from grain_sft.source.arrays import Arrays, Element, Int32s, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.source.overwriting import Copies, overwrite, runs_of
from grain_sft.source.withdrawn_documents import WithdrawnAtStep, WithdrawnDocuments

if TYPE_CHECKING:
    from jaxtyping import Int64

Ints = npt.NDArray[np.int64]

_ZEROS = runs_of(np.dtype(np.int32), 0)


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
        self._withdrawn_at: dict[str, Callable[[int], RowSource]] = {}
        unknown = np.ones(len(documents), np.bool_)
        for name, part, here, own in split_documents(layout, documents):
            unknown &= ~here
            if len(own):
                self._parts[name] = found = WithdrawnDocuments(part, own, steps[here])
                self._withdrawn_at[name] = _withdrawn_from(source.sources[name], found)
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
        return self._source.with_sources(
            {name: withdrawn_at(step) for name, withdrawn_at in self._withdrawn_at.items()}
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
            piece, _, count, number = self._parts[name].parts(found)
            row = found.row[piece] if at is None else at[found.row[piece]]
            count = np.where(self._parts[name].since(number) <= steps[row], count, 0)
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


def _withdrawn_from(source: NpyDataSource, documents: WithdrawnDocuments) -> Callable[[int], RowSource]:
    """Return a function of a step that returns `source` as it is at the step."""
    if source.layout.follows_documents and source.layout.row_format is None:
        return functools.partial(_PaddedPieces, source, documents)
    return functools.partial(_PaddedSpans, source, documents, Arrays(), Copies())


class _PaddedPieces(RowSource):
    """A source of a layout that follows documents, which pads the pieces of those withdrawn at `step` when it reads them."""

    def __init__(self, source: NpyDataSource, documents: WithdrawnDocuments, step: int) -> None:
        self.layout, self._source, self._withdrawn = source.layout, source, WithdrawnAtStep(documents, step)

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        return self._source.read(indices, self._withdrawn)

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """Return what `NpyDataSource.read_rows` returns."""
        return self._source.read_rows(indices, self._withdrawn)


class _PaddedSpans(RowSource):
    """A source of any other layout, which pads spans of the arrays that were read, or of copies where batches share them."""

    def __init__(
        self, source: NpyDataSource, documents: WithdrawnDocuments, arrays: Arrays, copies: Copies, step: int
    ) -> None:
        self.layout, self._source, self._documents, self._step = source.layout, source, documents, step
        self._arrays, self._copies, self._pad = arrays, copies, source.layout.corpus.padding_token_id
        self._pads = runs_of(np.dtype(np.int32), self._pad)

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        element, (rows, filled) = self._source.read(indices), checked_rows(indices, self.layout)
        length, real = self.layout.width(rows), np.flatnonzero(rows != FILL_ROW) if filled else None
        pieces = self.layout.pieces(rows if real is None else rows[real])
        if real is not None:
            pieces = pieces._replace(row=real[pieces.row])
        spans = self._documents.listed_spans(pieces, self._step, length)
        if not spans:
            return element
        start, stop = np.array(spans, np.int64).T
        copies, written = self._copies_of({key: element[key] for key in ("segment_ids", "positions")})
        written += itertools.starmap(slice, spans)
        element |= copies
        for key, array in element.items():
            if not array.flags.writeable:
                element[key] = self._arrays.empty(array.shape, array.dtype)
                element[key][...] = array
        runs = ((array, runs_of(array.dtype, self._pad if key == "tokens" else 0)) for key, array in element.items())
        overwrite(start, stop - start, *runs)
        for copied in copies.values():
            copied.flags.writeable = False
        return element

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """Return what `NpyDataSource.read_rows` returns. `loss` is as it was, also where `target_segment_ids` are now 0."""
        read = self._source.read_rows(indices)
        if read is None:
            return None
        pieces = self.layout.pieces(checked_rows(indices, self.layout)[0]) if read.pieces is None else read.pieces
        length = read.inputs.shape[1]
        spans = self._documents.listed_spans(pieces, self._step, length)
        if not spans:
            return read
        arrays = {name: getattr(read, name) for name in ("positions", "segment_ids", "target_segment_ids")}
        copies, written = self._copies_of(arrays)
        arrays |= copies
        read = read._replace(**copies, pieces=None)  # the pieces do not show this padding
        inputs, targets, positions, segments, taken = (
            array.reshape(-1).data for array in (read.inputs, read.targets, *arrays.values())
        )
        for begin, end in spans:
            count, first = end - begin, begin - (begin % length > 0)
            # `first` is the token whose target is the span's first; a row's first token is the target of none
            where, target = slice(begin, end), slice(first, end)
            written.append(target)
            positions[where] = segments[where] = _ZEROS[count]
            taken[target] = _ZEROS[end - first]
            inputs[where] = self._pads[count]
            targets[first : end - 1] = self._pads[end - 1 - first]
        for copied in copies.values():
            copied.flags.writeable = False
        return read

    def _copies_of(self, arrays: dict[str, Int32s]) -> tuple[dict[str, Any], list[slice]]:
        """Return writable copies of those arrays that batches share, and the list of the slices that are written to. Their
        memory is used again, and only these slices are restored: the caller makes them read-only."""
        shared = {name: array for name, array in arrays.items() if not array.flags.writeable}
        if not shared:
            return {}, []
        copies, written = self._copies.of(tuple(shared.values()))
        return dict(zip(shared, copies, strict=True)), written
