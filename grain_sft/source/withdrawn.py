"""Withdrawals: documents whose tokens are padding from a step on."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, Layout, Pieces, checked_rows, ragged
from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.source.overwriting import Copies, runs_of

if TYPE_CHECKING:
    from jaxtyping import Int64

Ints = npt.NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max
_MOST_EXACT = 1 << 24  # documents, at a byte each


class _Documents:
    """Withdrawn documents of one layout, by number, each with the step from which it is withdrawn."""

    def __init__(self, layout: Layout, documents: Ints, steps: Ints) -> None:
        order = np.lexsort((steps, documents))  # the first step of a document that is withdrawn twice counts
        self.layout = layout
        self._numbers, first = np.unique(documents[order], return_index=True)
        self._steps: Ints = steps[order][first]
        if layout.follows_documents:
            # Rules out all other documents without a search, or nearly all where there are more than `_MOST_EXACT`.
            places = max(min(layout.num_documents, _MOST_EXACT), 16 * len(self._numbers))
            self._mask = (1 << places.bit_length()) - 1
            self._exact = layout.num_documents <= self._mask  # the last place, that of -1, is then of no document
            self._maybe = np.zeros(self._mask + 1, np.bool_)
            self._maybe[self._numbers & self._mask] = True
        else:
            start, length = (column[self._numbers] for column in layout.corpus.documents)
            self._starts, self._stops, self._steps = _disjoint(start, start + length, self._steps)
            self._shards = np.cumsum([0, *(shard.num_tokens for shard in layout.corpus.shards)])

    def parts(self, pieces: Pieces) -> tuple[Ints, Ints | int, Ints, Ints]:
        """Return the parts of `pieces` that are withdrawn at some step, int64 [n] each: index of the piece, first token counted
        from the piece's (0 for that of each), length, and number of the withdrawn document or span, for `since`."""
        if self.layout.follows_documents:
            assert pieces.document is not None
            at = self._maybe[pieces.document if self._exact else pieces.document & self._mask].nonzero()[0]
            document = pieces.document[at]
            if not self._exact:
                at, document = (each[np.isin(document, self._numbers)] for each in (at, document))
            return at, 0, pieces.length[at], document
        begin = self._shards[pieces.shard] + pieces.start
        end = begin + pieces.length
        low = self._stops.searchsorted(begin, side="right")
        at, number = ragged(self._starts.searchsorted(end) - low)
        span, begin = low[at] + number, begin[at]
        first = np.maximum(self._starts[span], begin)
        return at, first - begin, np.minimum(self._stops[span], end[at]) - first, span

    def since(self, numbers: Ints) -> Ints:
        """Return the step from which each of the documents or spans `numbers`, int64 [n], is withdrawn."""
        return self._steps[self._numbers.searchsorted(numbers) if self.layout.follows_documents else numbers]

    @functools.cached_property
    def last_step(self) -> int:
        """The step from which all are withdrawn."""
        return int(self._steps.max(initial=0))


def _disjoint(starts: Ints, stops: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Return ascending spans that do not overlap, and the first step at which a span that holds each is withdrawn. Documents of
    some formats are in any order, share tokens, or have none."""
    borders = np.sort(np.concatenate([starts, stops]))
    low, high = borders.searchsorted(starts), borders.searchsorted(stops)
    of, number = ragged(high - low)
    since = np.full(len(borders), _NEVER)
    np.minimum.at(since, low[of] + number, steps[of])
    kept = np.flatnonzero((since[:-1] < _NEVER) & (borders[1:] > borders[:-1]))
    return borders[kept], borders[kept + 1], since[kept]


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
        self._source, self._layout = source, source.layout
        self.arrays, self.copies = Arrays(), Copies()
        layout = source.layout
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

    def spans(self, rows: Ints, step: int, pieces: Pieces | None = None) -> Iterator[tuple[Ints, Ints, int]]:
        """Yield for each source with spans that are withdrawn at `step`: start and stop of each in the flattened `rows`, int64
        [n], and the padding token. `pieces` are those of the rows of a single source, where the caller has them."""
        length = self._layout.width(rows)
        real = np.flatnonzero(rows != FILL_ROW) if FILL_ROW in rows else None
        for name, at, found in self._pieces(rows if real is None else rows[real], pieces):
            documents = self._parts[name]
            piece, first, count, number = documents.parts(found)
            if step < documents.last_step:
                kept = np.flatnonzero(documents.since(number) <= step)
                piece, first, count = piece[kept], first if isinstance(first, int) else first[kept], count[kept]
            if len(piece):
                row = found.row[piece] if at is None else at[found.row[piece]]
                start = (row if real is None else real[row]) * length + found.column[piece] + first
                yield start, start + count, self._pads[name]

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


class _SourceAtStep(RowSource):
    """A source whose documents withdrawn at `step` are padding."""

    def __init__(self, source: NpyDataSource | MixtureSource, withdrawals: Withdrawals, step: int) -> None:
        self.layout, self._source, self._withdrawals, self._step = source.layout, source, withdrawals, step

    def read(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> Element:
        element = self._source.read(indices)
        if spans := list(self._withdrawals.spans(checked_rows(indices, self.layout)[0], self._step)):
            for key, array in element.items():
                if not array.flags.writeable:
                    element[key] = self._withdrawals.arrays.empty(array.shape, array.dtype)
                    element[key][...] = array
            for start, stop, pad in spans:
                slices = list(map(slice, start.tolist(), stop.tolist()))
                for key, array in element.items():
                    flat, runs = array.reshape(-1).data, runs_of(array.dtype, pad if key == "tokens" else 0)
                    for where in slices:
                        flat[where] = runs[where.stop - where.start]
        return element

    def read_rows(self, indices: Sequence[int] | npt.NDArray[np.integer]) -> ReadRows | None:
        """Return what `NpyDataSource.read_rows` returns; None for the rows of a mixture. `loss` is as it was, also where
        `target_segment_ids` are now 0."""
        read: ReadRows | None = getattr(self._source, "read_rows", lambda indices: None)(indices)
        if read is None:
            return None
        length, names = read.inputs.shape[1], ("positions", "segment_ids", "target_segment_ids")
        for start, stop, pad in self._withdrawals.spans(checked_rows(indices, self.layout)[0], self._step, read.pieces):
            before = start - (start % length > 0)  # the token whose target is the span's first; none where a row begins
            arrays = [getattr(read, name) for name in names]
            if shared := tuple(array for array in arrays if not array.flags.writeable):
                copies = iter(self._withdrawals.copies.of(shared, before, stop))
                arrays = [array if array.flags.writeable else next(copies) for array in arrays]
                read = read._replace(**dict(zip(names, arrays, strict=True)))
            zeros, pads = runs_of(read.inputs.dtype, 0), runs_of(read.inputs.dtype, pad)
            inputs, targets, positions, segments, taken = (
                array.reshape(-1).data for array in (read.inputs, read.targets, *arrays)
            )
            for first, begin, end in zip(before.tolist(), start.tolist(), stop.tolist(), strict=True):
                where, nothing = slice(begin, end), zeros[end - begin]
                positions[where] = segments[where] = taken[where] = nothing
                inputs[where] = pads[end - begin]
                targets[first : end - 1] = pads[end - 1 - first]
                taken[first] = 0
        return read
