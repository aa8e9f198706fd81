"""Withdrawals: documents that a run stops training on at a given step."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import numpy as np

from grain_sft.errors import RowIndexError
from grain_sft.layout import FILL_ROW, Layout, Pieces, checked_rows, expand_counts, split_documents
from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.types import Array, Bools, Integers, Ints

_NEVER = np.iinfo(np.int64).max


class Withdrawals:
    """Documents that are withdrawn from a run, each at its own step.

    From its step on, the tokens of a document are padding: the padding token, segment 0, position 0, no loss.

    Args:
      source: Source of the rows.
      documents: int64 [n], n > 0. Numbers of documents as `grain-sft trace` prints them, in [0, source.layout.num_documents).
      steps: int64 [n], first step at which each document is withdrawn.

    Raises:
      RowIndexError: An item of `documents` is not in this range.
      CorpusError, CorpusFileError: The documents cannot be found.
    """

    def __init__(self, source: NpyDataSource | MixtureSource, documents: Ints, steps: Ints) -> None:
        self._source, self._layout = source, source.layout
        self._parts: dict[str, _WithdrawnDocuments] = {}
        self._arrays = Arrays()
        unknown = np.ones(len(documents), np.bool_)
        # `in_part` is a mask of the documents that a part has, and `own` are the numbers of these documents in the part
        for name, part, in_part, own in split_documents(self._layout, documents):
            unknown &= ~in_part
            if len(own):
                self._parts[name] = _WithdrawnDocuments(part, own, steps[in_part])
        if unknown.any():
            expected = f"expected 0 to {self._layout.num_documents - 1}, the documents of the run"
            raise RowIndexError(f"withdraw: document {documents[unknown][0]}: {expected}.")
        self._first_step = int(steps.min())

    def source_at(self, step: int) -> RowSource:
        """Return the source of the rows at `step`, with padding in place of withdrawn documents."""
        if step < self._first_step:
            return self._source
        sources = self._source.sources
        padded = {name: _PaddedSource(sources[name], part, self._arrays, step) for name, part in self._parts.items()}
        return self._source.with_sources(padded)

    def spans(self, rows: Ints, step: int) -> Iterator[tuple[int, int]]:
        """Yield (start, stop) of each span of withdrawn tokens in `rows`, int64 [n], at `step`.

        Start and stop are indices into the flattened batch. With rows of 100 tokens, index 205 is token 5 of the third row.
        """
        length = self._layout.width(rows)
        # `indices` are the places of a source's rows in `rows`, and `own` are the numbers of these rows in the source
        for name, indices, own in self._layout.split(rows):
            if (documents := self._parts.get(name)) is not None:
                for start, stop in documents.spans(own, step, length):
                    row = start // length  # index in `own`
                    moved = (indices.item(row) - row) * length
                    yield start + moved, stop + moved

    def tokens_of_pieces(self, rows: Ints, steps: Ints, pieces: Pieces) -> Ints:
        """Return the number of withdrawn tokens in each piece, int64 [pieces].

        `pieces` are the pieces of `rows`. The run reads row rows[i] at step steps[i].
        """
        counts = np.zeros(len(pieces.row), np.int64)
        for name, indices, own in self._layout.split(rows):
            if (documents := self._parts.get(name)) is not None:
                of_source = pieces if documents.layout is self._layout else documents.layout.pieces(own)
                piece, _, count, since = documents.parts(of_source)
                # `of_source.row` are indices into `own`, and `indices` are the places of these rows in `rows`
                count = np.where(since <= steps[indices[of_source.row[piece]]], count, 0)
                by_piece = np.bincount(piece, count, len(of_source.row)).astype(np.int64)
                # the pieces of one source are in the same order in `pieces` and `of_source`
                counts[np.isin(pieces.row, indices)] = by_piece
        return counts


class _PaddedSource(RowSource):
    """Rows of a source, with padding in place of the documents that are withdrawn at `step`."""

    def __init__(self, source: NpyDataSource, documents: _WithdrawnDocuments, arrays: Arrays, step: int) -> None:
        self.layout, self._source, self._documents = source.layout, source, documents
        self._arrays, self._step, self._pad = arrays, step, source.layout.corpus.padding_token_id

    def read(self, indices: Sequence[int] | Integers) -> Element:
        """Return the arrays of `NpyDataSource.read`, with padding in place of withdrawn documents."""
        element = self._source.read(indices)
        spans = self._documents.spans(indices, self._step, element["tokens"].shape[1])
        if not spans:
            return element
        for key, array in element.items():
            element[key] = self._writable(array)
            flat, value = element[key].reshape(-1), self._pad if key == "tokens" else 0
            for begin, end in spans:
                flat[begin:end] = value
        return element

    def read_rows(self, indices: Sequence[int] | Integers) -> ReadRows | None:
        """Return the arrays of `NpyDataSource.read_rows`, with padding in all arrays but `loss`.

        `loss` is ignored where `target_segment_ids` is 0, as in padding.
        """
        read = self._source.read_rows(indices)
        if read is None:
            return None
        length = read.inputs.shape[1]
        spans = self._documents.spans(indices, self._step, length, read.pieces)
        if not spans:
            return read
        arrays = {name: self._writable(getattr(read, name)) for name in ReadRows._fields[:5]}  # all but loss and pieces
        inputs, targets, positions, segments, target_segments = (array.reshape(-1) for array in arrays.values())
        for begin, end in spans:
            # A target is the token after its input. So the withdrawn targets begin one column before the withdrawn inputs,
            # except at the start of a row.
            first = begin - (begin % length > 0)
            inputs[begin:end] = targets[first : end - 1] = self._pad
            positions[begin:end] = segments[begin:end] = target_segments[first:end] = 0
        return read._replace(**arrays, pieces=None)  # `read.pieces` still has the withdrawn tokens

    def _writable(self, array: Array) -> Array:
        """Return `array`, or a copy of it if it is read-only."""
        if array.flags.writeable:
            return array
        copied = self._arrays.empty(array.shape, array.dtype)
        copied[...] = array
        return copied


class _WithdrawnDocuments:
    """Withdrawn documents of one layout. Document `documents[i]` is withdrawn from step `steps[i]` on."""

    def __init__(self, layout: Layout, documents: Ints, steps: Ints) -> None:
        order = np.argsort(steps)  # `np.unique` then keeps the lowest step of a document that is listed twice
        self.layout = layout
        self._numbers, first = np.unique(documents[order], return_index=True)
        self._steps: Ints = steps[order[first]]
        if layout.follows_documents:
            # The last item stays False. It has the index -1, which is the number of pieces outside all documents.
            self._is_withdrawn = np.zeros(layout.num_documents + 1, np.bool_)
            self._is_withdrawn[self._numbers] = True
        else:  # pieces state no documents, so parts of pieces are found by the spans of the documents in the corpus
            start, length = (column[self._numbers] for column in layout.corpus.documents)
            self._starts, self._stops, self._steps = _disjoint(start, start + length, self._steps)

    def parts(self, pieces: Pieces) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the parts of `pieces` that are withdrawn at some step. A part is consecutive tokens of one piece.

        Returns:
          Four int64 [parts]: index of the part's piece, number of the piece's tokens before the part, number of the part's
          tokens, and first step at which the part is withdrawn.
        """
        if pieces.document is not None:
            piece = self._is_withdrawn[pieces.document].nonzero()[0]
            steps = self._steps[self._numbers.searchsorted(pieces.document[piece])]
            return piece, np.zeros_like(piece), pieces.length[piece], steps
        begin = self.layout.corpus.shard_borders[pieces.shard] + pieces.start
        end = begin + pieces.length
        # Piece i overlaps the withdrawn spans low[i], low[i] + 1, ...; each overlap is a part. For each part, `piece` is its
        # piece, and `number` is its number among the parts of this piece.
        low = self._stops.searchsorted(begin, side="right")
        piece, number = expand_counts(self._starts.searchsorted(end) - low)
        span, begin = low[piece] + number, begin[piece]
        first = np.maximum(self._starts[span], begin)
        return piece, first - begin, np.minimum(self._stops[span], end[piece]) - first, self._steps[span]

    def spans(
        self, indices: Sequence[int] | Integers, step: int, length: int, pieces: Pieces | None = None
    ) -> list[tuple[int, int]]:
        """Return (start, stop) of each span of withdrawn tokens at `step`, as indices into the flattened batch.

        `length` is the number of tokens of a row. `pieces` are the pieces of the rows `indices`; None means that this method
        computes them.
        """
        rows, _ = checked_rows(indices, self.layout)
        if not self._in_row[rows].any():  # checked first, because computing the pieces of long rows is slow
            return []
        if pieces is None:
            real = np.flatnonzero(rows != FILL_ROW)
            pieces = self.layout.pieces(rows[real])
            pieces = pieces._replace(row=real[pieces.row])
        piece, first, count, since = self.parts(pieces)
        start = pieces.offsets(length)[piece] + first
        now = (since <= step) & (count > 0)
        return list(zip(start[now].tolist(), (start + count)[now].tolist(), strict=True))

    @functools.cached_property
    def _in_row(self) -> Bools:
        """Whether each row of the layout has a document that is withdrawn at some step: bool [rows of the layout]."""
        in_row = np.zeros(len(self.layout), np.bool_)
        in_row[self.layout.rows_of_documents(self._numbers)] = True
        return in_row


def _disjoint(starts: Ints, stops: Ints, steps: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the starts, stops and steps of sorted spans without overlap that cover the same tokens as the arguments.

    In some formats, documents overlap, are unsorted or are empty. If [0, 10) is withdrawn from step 5 on, and [4, 6) from step
    2 on, the result is [0, 4) from 5 on, [4, 6) from 2 on, and [6, 10) from 5 on.
    """
    borders = np.sort(np.concatenate([starts, stops]))
    low, high = borders.searchsorted(starts), borders.searchsorted(stops)
    document, number = expand_counts(high - low)
    since = np.full(len(borders), _NEVER)  # first step at which the tokens after each border are withdrawn
    np.minimum.at(since, low[document] + number, steps[document])
    kept = np.flatnonzero((since[:-1] < _NEVER) & (borders[1:] > borders[:-1]))
    return borders[kept], borders[kept + 1], since[kept]
