"""Withdrawals: documents whose tokens are padding from a step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, Layout, Pieces, checked_rows, ragged
from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource

if TYPE_CHECKING:
    from jaxtyping import Int64

Ints = npt.NDArray[np.int64]


class _Documents:
    """Withdrawn documents of one layout, by number, each with the step from which it is withdrawn."""

    def __init__(self, layout: Layout, documents: Ints, steps: Ints) -> None:
        order = np.lexsort((steps, documents))  # the first step of a document that is withdrawn twice counts
        self.layout = layout
        self._numbers, first = np.unique(documents[order], return_index=True)
        self._steps: Ints = steps[order][first]
        # Rules out nearly all other documents without a search: exact where the table has a place for each document.
        self._mask = (1 << (16 * max(1, len(self._numbers))).bit_length()) - 1
        self._maybe = np.zeros(self._mask + 1, np.bool_)
        self._maybe[self._numbers & self._mask] = True
        if not layout.follows_documents:
            start, length = (column[self._numbers] for column in layout.corpus.documents)
            self._starts, self._stops = start, start + length
            self._shards = np.cumsum([0, *(shard.num_tokens for shard in layout.corpus.shards)])

    def parts(self, pieces: Pieces, steps: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the parts of `pieces` that are withdrawn at `steps`, int64 [pieces]: index of the piece, first token counted
        from the piece's, and length, int64 [n] each."""
        if self.layout.follows_documents:
            assert pieces.document is not None
            at = np.flatnonzero(self._maybe[pieces.document & self._mask])
            found = np.minimum(self._numbers.searchsorted(pieces.document[at]), len(self._numbers) - 1)
            kept = (self._numbers[found] == pieces.document[at]) & (self._steps[found] <= steps[at])
            at = at[kept]
            return at, np.zeros(len(at), np.int64), pieces.length[at]
        begin = self._shards[pieces.shard] + pieces.start
        low, high = self._stops.searchsorted(begin, side="right"), self._starts.searchsorted(begin + pieces.length)
        count = np.maximum(high - low, 0)
        at, number = ragged(count)
        document = low[at] + number
        first = np.maximum(self._starts[document] - begin[at], 0)
        length = np.minimum(self._stops[document] - begin[at], pieces.length[at]) - first
        kept = (self._steps[document] <= steps[at]) & (length > 0)
        return at[kept], first[kept], length[kept]


class Withdrawals:
    """Documents that are withdrawn from a run, each from a step on.

    Their tokens are padding then, as at the end of a row: the padding token, segment 0, position 0, no loss. All other values
    of a row are what they were.

    Args:
      source: Source of the rows.
      documents: int64 [n], numbers of documents as a trace prints them, in [0, source.layout.num_documents).
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
        self._source, layout = source, source.layout
        self._layout, self._arrays = layout, Arrays()
        self._parts: dict[str, _Documents] = {}
        self._pads = {name: part.corpus.padding_token_id for name, part in layout.parts.items()}
        end = 0
        for name in sorted(layout.parts, key=lambda name: not layout.parts[name].follows_documents):
            if int(documents.max(initial=-1)) < end:
                break  # the documents of the other parts, which may be unknown, are numbered after these
            part, first = layout.parts[name], layout.first_document(name)
            end = first + part.num_documents
            own = (documents >= first) & (documents < end)
            if own.any():
                self._parts[name] = _Documents(part, documents[own] - first, steps[own])
        wrong = documents[(documents < 0) | (documents >= end)]
        if len(wrong):
            raise RowIndexError(f"withdraw: document {wrong[0]}: expected 0 to {end - 1}, the documents of the run.")

    def source_at(self, step: int) -> RowSource:
        """Return the source as it is at `step`."""
        return _SourceAtStep(self._source, self, step)

    def spans(self, rows: Ints, step: int, pieces: Pieces | None = None) -> Iterator[tuple[int, int, int]]:
        """Yield start and stop of each withdrawn span in the flattened `rows`, and the padding token. `pieces` are those of the
        rows of a single source, where the caller has them."""
        real, length = np.flatnonzero(rows != FILL_ROW), self._layout.sequence_length
        for name, at, found, piece, first, count in self._find(rows[real], np.broadcast_to(step, len(real)), pieces):
            begin = real[at[found.row[piece]]] * length + found.column[piece] + first
            pad = self._pads[name]
            yield from (
                (start, stop, pad) for start, stop in zip(begin.tolist(), (begin + count).tolist(), strict=True)
            )

    def copied(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return a copy in memory that is reused."""
        copy = self._arrays.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def tokens_of_pieces(self, rows: Ints, steps: Ints, pieces: Pieces) -> Ints:
        """Return the number of withdrawn tokens of each of the `pieces` of `rows`, read at `steps`, int64 [pieces]."""
        counts = np.zeros(len(pieces.row), np.int64)
        for _, at, found, piece, _, count in self._find(rows, steps, pieces if "" in self._parts else None):
            in_part = np.bincount(piece, count, len(found.row)).astype(np.int64)
            counts[np.flatnonzero(np.isin(pieces.row, at))] += in_part
        return counts

    def _find(
        self, rows: Ints, steps: Ints, pieces: Pieces | None
    ) -> Iterator[tuple[str, Ints, Pieces, Ints, Ints, Ints]]:
        """Yield for each source with documents that are withdrawn: its name, the indices of its rows in `rows`, their pieces,
        and what `_Documents.parts` returns of these at `steps`, one for each row."""
        for name, at, own in self._layout.split(rows):
            if (part := self._parts.get(name)) is not None:
                found = part.layout.pieces(own) if pieces is None else pieces
                yield name, at, found, *part.parts(found, steps[at[found.row]])


class _SourceAtStep(RowSource):
    """A source whose documents withdrawn at `step` are padding."""

    def __init__(self, source: NpyDataSource | MixtureSource, withdrawals: Withdrawals, step: int) -> None:
        self.layout, self._source, self._withdrawals, self._step = source.layout, source, withdrawals, step

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        element = self._source.read(indices)
        if spans := list(self._withdrawals.spans(checked_rows(indices, self.layout)[0], self._step)):
            element = {key: self._writeable(array) for key, array in element.items()}
            flat = {key: array.reshape(-1) for key, array in element.items()}
            for start, stop, pad in spans:
                for key, array in flat.items():
                    array[start:stop] = pad if key == "tokens" else 0
        return element

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """Return what `NpyDataSource.read_rows` returns; None for the rows of a mixture."""
        read: ReadRows | None = getattr(self._source, "read_rows", lambda indices: None)(indices)
        if read is None:
            return None
        spans = list(self._withdrawals.spans(checked_rows(indices, self.layout)[0], self._step, read.pieces))
        if not spans:
            return read
        names = ("positions", "segment_ids", "target_segment_ids", *(() if read.loss is None else ("loss",)))
        changed: dict[str, Any] = {name: self._writeable(getattr(read, name)) for name in names}
        read = read._replace(**changed)
        zeroed = [array.reshape(-1) for array in changed.values()]
        inputs, targets, taken, length = (
            read.inputs.reshape(-1),
            read.targets.reshape(-1),
            zeroed[2],
            self.layout.sequence_length,
        )
        for start, stop, pad in spans:
            before = start - (start % length > 0)  # the token before, whose target is withdrawn
            inputs[start:stop] = pad
            targets[before : stop - 1] = pad
            taken[before] = 0
            for array in zeroed:
                array[start:stop] = 0
        return read

    def _writeable(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return array if array.flags.writeable else self._withdrawals.copied(array)
