"""From rows to documents and back, for many rows at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.errors import RowIndexError
from grain_sft.layout import Layout, MaterializedLayout, PackedLayout, PaddedLayout, Pieces, WindowLayout
from grain_sft.layout.mixture import MixtureLayout

Ints = npt.NDArray[np.int64]


FOLLOWING = (PackedLayout, PaddedLayout, MaterializedLayout)
"""Layouts whose rows are made of documents that have numbers."""


def follows_documents(layout: Layout, rows: Ints) -> npt.NDArray[np.bool_]:
    """Whether each of `rows` (int64 [n]) is made of documents that have numbers."""
    if isinstance(layout, MixtureLayout):
        return np.array([isinstance(part, FOLLOWING) for part in layout.parts])[layout.parts_of(rows)]
    return np.full(len(rows), isinstance(layout, FOLLOWING))


def first_document(layout: MixtureLayout, number: int) -> int:
    """The number that the first document of source `number`, which follows documents, has in a mixture: after those of
    the sources before it that do."""
    before = (part for part in layout.parts[:number] if isinstance(part, FOLLOWING))
    return sum(num_documents(part) for part in before)


def number_of_document(layout: Layout, source: str, number: int) -> int:
    """The number that a document has in a trace: in a mixture, of `number` in the corpus of a source.

    Raises:
      RowIndexError: no such source, or a name where there is no mixture.
      CorpusError, CorpusFileError: as `num_documents`, for a source that does not follow documents.
    """
    if not source:
        return number
    if not isinstance(layout, MixtureLayout) or source not in layout.names:
        named = ", ".join(layout.names) if isinstance(layout, MixtureLayout) else "none: it is no mixture"
        raise RowIndexError(f"document {source}:{number}: no such source; there are {named}.")
    place = layout.names.index(source)
    if isinstance(layout.parts[place], FOLLOWING):
        return first_document(layout, place) + number
    others = (part for part in layout.parts[:place] if not isinstance(part, FOLLOWING))
    return first_document(layout, len(layout.parts)) + sum(map(num_documents, others)) + number


def layouts_of(layout: Layout) -> list[tuple[int, Layout]]:
    """The layouts of whose corpora a trace numbers the documents, each with the number of its first: one, or of a mixture those
    of all sources that follow documents."""
    if not isinstance(layout, MixtureLayout):
        return [(0, layout)]
    following = [number for number, part in enumerate(layout.parts) if isinstance(part, FOLLOWING)]
    return [(first_document(layout, number), layout.parts[number]) for number in following]


def numbers_in(layout: Layout, documents: Ints) -> Ints:
    """The numbers, ascending, of those documents of a layout, as it finds them, that hold a token of `documents`, which are
    those of its corpus."""
    found = layout.other_documents if isinstance(layout, PackedLayout) else None
    if found is None:
        return documents
    start, length = layout.corpus.documents.start[documents], layout.corpus.documents.length[documents]
    first = (found.start + found.length).searchsorted(start, side="right")
    count = np.maximum(found.start.searchsorted(start + length, side="left") - first, 0)
    return np.unique(first.repeat(count) + np.arange(int(count.sum())) - (count.cumsum() - count).repeat(count))


def num_documents(layout: Layout) -> int:
    """Documents of a layout's corpus, as the layout finds them."""
    return (
        int(layout.plans[0].counts["documents"]) if isinstance(layout, PackedLayout) else len(layout.corpus.documents)
    )


def epochs_of(layout: Layout, epochs: Ints, rows: Ints) -> Ints:
    """Epochs (int64 [n]) of the sampler that read `rows`, counted in epochs of the layout where it packs each anew."""
    if isinstance(layout, MixtureLayout):
        epochs = epochs.copy()
        for number, at, own in layout.split(rows):
            epochs[at] = epochs_of(layout.parts[number], epochs[at], own)
        return epochs
    if isinstance(layout, PackedLayout) and layout.epochs > 1:
        return epochs * layout.epochs + layout.epochs_of(rows)[0]
    return epochs


def documents_of(layout: Layout, rows: Ints, pieces: Pieces) -> Ints:
    """The document of each of the `pieces` of `rows`, int64 [pieces]; -1 in a layout that follows none."""
    if isinstance(layout, MixtureLayout):
        return _documents_of_mixture(layout, rows, pieces)
    if isinstance(layout, PackedLayout):
        assert pieces.segment is not None
        epoch, local = layout.epochs_of(rows)
        found = np.empty(len(pieces.row), np.int64)
        for number in np.unique(epoch).tolist():
            plan = layout.plans[number]
            here = np.flatnonzero(epoch[pieces.row] == number)
            row = local[pieces.row[here]]  # of this epoch's plan: those of others count rows of their own
            first = np.where(row > 0, plan.ends[row - 1], 0)
            found[here] = plan.document[first + pieces.segment[here] - 1]
        return found
    if isinstance(layout, PaddedLayout):
        return layout.documents[rows][pieces.row]
    if isinstance(layout, MaterializedLayout):
        assert pieces.segment is not None
        begins = layout.corpus.documents.start.searchsorted(rows * layout.sequence_length)
        return begins[pieces.row] + pieces.segment - 1
    return np.full(len(pieces.row), -1, np.int64)


def _documents_of_mixture(layout: MixtureLayout, rows: Ints, pieces: Pieces) -> Ints:
    found = np.full(len(pieces.row), -1, np.int64)
    part = layout.parts_of(rows)
    for number in np.unique(part).tolist():
        if isinstance(layout.parts[number], FOLLOWING):
            mine = np.flatnonzero(part == number)
            here = np.flatnonzero(part[pieces.row] == number)
            some = Pieces(*(column[here] for column in pieces if column is not None))
            some = some._replace(row=mine.searchsorted(some.row), shard=some.shard - layout.first_shards[number])
            own = documents_of(layout.parts[number], rows[mine] - layout.first_rows[number], some)
            found[here] = own + first_document(layout, number)
    return found


def rows_of_documents(layout: Layout, documents: Ints) -> Ints:
    """The rows of a layout that hold a token of `documents` (int64 [n]), ascending.

    Raises:
      RowIndexError: a number that is no document.
      CorpusError, CorpusFileError: where documents are can't be told.
    """
    if isinstance(layout, MixtureLayout):
        return _rows_in_mixture(layout, documents)
    if isinstance(layout, PackedLayout):
        _check(documents, layout.plans[0].counts["documents"])
        found, before = [], 0
        for plan in layout.plans:
            pieces = np.flatnonzero(np.isin(plan.document, documents))
            found.append(plan.ends.searchsorted(pieces, side="right") + before)
            before += len(plan.ends)
        return np.unique(np.concatenate(found))
    starts, lengths = layout.corpus.documents
    _check(documents, len(starts))
    if isinstance(layout, PaddedLayout):
        return np.flatnonzero(np.isin(layout.documents, documents))
    if isinstance(layout, MaterializedLayout):
        return np.unique(starts[documents] // layout.sequence_length)
    if not isinstance(layout, WindowLayout):
        raise RowIndexError(f"{layout!r}: what documents its rows hold is not known.")
    return _windows(layout, starts[documents], lengths[documents])


def _rows_in_mixture(layout: MixtureLayout, documents: Ints) -> Ints:
    """Sources that follow documents come first, then the others, which are not counted unless one of theirs is asked for:
    that may mean to read all of their tokens."""
    before, found = 0, [np.zeros(0, np.int64)]
    for number in sorted(range(len(layout.parts)), key=lambda number: not isinstance(layout.parts[number], FOLLOWING)):
        if int(documents.max(initial=-1)) < before:
            break
        end = before + num_documents(layout.parts[number])
        mine = documents[(documents >= before) & (documents < end)] - before
        found.append(rows_of_documents(layout.parts[number], mine) + layout.first_rows[number])
        before = end
    _check(documents, before)
    return np.unique(np.concatenate(found))


def _windows(layout: WindowLayout, starts: Ints, lengths: Ints) -> Ints:
    """Windows that hold some of these ranges of the corpus's tokens."""
    length, begin, first = layout.sequence_length, 0, 0
    found = [np.zeros(0, np.int64)]
    for shard in layout.corpus.shards:
        rows = shard.num_tokens // length
        low = np.maximum(starts - begin, 0) // length
        high = np.minimum(-(-(starts + lengths - begin) // length), rows)
        found += [np.arange(a, b) + first for a, b in zip(low.tolist(), high.tolist(), strict=True) if a < b]
        begin, first = begin + shard.num_tokens, first + rows
    return np.unique(np.concatenate(found))


def _check(documents: Ints, count: int) -> None:
    wrong = documents[(documents < 0) | (documents >= count)]
    if len(wrong):
        raise RowIndexError(f"document {wrong[0]}: expected 0 to {count - 1}, the corpus's documents.")
