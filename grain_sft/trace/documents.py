"""From rows to documents and back, for many rows at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.corpus.stored import read_whole
from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.layout import Layout, MaterializedLayout, PackedLayout, PaddedLayout, Pieces, WindowLayout

Ints = npt.NDArray[np.int64]


def follows_documents(layout: Layout) -> bool:
    """Whether rows of the layout are made of documents that have numbers."""
    return isinstance(layout, PackedLayout | PaddedLayout | MaterializedLayout)


def documents_of(layout: Layout, rows: Ints, pieces: Pieces) -> Ints:
    """The document of each of the `pieces` of `rows`, int64 [pieces]; -1 in a layout that follows none."""
    if isinstance(layout, PackedLayout):
        assert pieces.segment is not None
        epoch, local = plan_of(layout, rows)
        found = np.empty(len(pieces.row), np.int64)
        for number in np.unique(epoch).tolist():
            plan = layout.plans[number]
            first = np.where(local > 0, plan.ends[local - 1], 0)
            here = np.flatnonzero(epoch[pieces.row] == number)
            found[here] = plan.document[first[pieces.row[here]] + pieces.segment[here] - 1]
        return found
    if isinstance(layout, PaddedLayout):
        return layout.documents[rows][pieces.row]
    if isinstance(layout, MaterializedLayout):
        assert pieces.segment is not None
        begins = layout.corpus.documents.start.searchsorted(rows * layout.sequence_length)
        return begins[pieces.row] + pieces.segment - 1
    return np.full(len(pieces.row), -1, np.int64)


def plan_of(layout: PackedLayout, rows: Ints) -> tuple[Ints, Ints]:
    """For each of `rows` (int64 [rows]) the number of its plan, that is the epoch that it was packed for, and its own
    number in it."""
    ends = np.cumsum([len(plan.ends) for plan in layout.plans])
    epoch = ends.searchsorted(rows, side="right")
    return epoch, rows - np.append(0, ends)[epoch]


def rows_of_documents(layout: Layout, documents: Ints) -> Ints:
    """The rows of a layout that hold a token of `documents` (int64 [n]), ascending.

    Raises:
      RowIndexError: a number that is no document.
      CorpusError, CorpusFileError: where documents are can't be told.
    """
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


class Sources:
    """Where documents come from: of the corpus's file of sources, or by the labels that a mix gives its shards.

    Attributes:
      names: of the sources that are counted; one that nothing names is "".
    """

    def __init__(self, layout: Layout) -> None:
        corpus = layout.corpus
        self._table: Ints | None = source_table(corpus) if follows_documents(layout) else None
        if self._table is not None:
            count = max(len(corpus.source_names), int(self._table[:, 0].max(initial=-1)) + 1)
            self.names = (*corpus.source_names, *("" for _ in range(count - len(corpus.source_names))))
            return
        labels = [shard.label for shard in corpus.shards]
        self.names = tuple(dict.fromkeys(labels))
        self._labels: Ints = np.array([self.names.index(label) for label in labels], np.int64)

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """(source, record) of each piece: its number in `names`; and the line or row in it, from 1, -1 where the corpus
        does not say."""
        if self._table is None:
            return self._labels[shards], np.full(len(shards), -1, np.int64)
        if len(documents) and int(documents.max()) >= len(self._table):
            raise CorpusError(
                f"the corpus's file of sources lists {len(self._table)} documents, but there is a document "
                f"{int(documents.max())}. It is of another corpus, or documents were found another way (boundaries)."
            )
        found = self._table[documents]
        return found[:, 0], found[:, 1]


def source_table(corpus: Corpus) -> Ints | None:
    """`Corpus.sources`, without looking for the documents."""
    if corpus.sources_file is None:
        return None
    if "sources" in vars(corpus):
        return corpus.sources
    data = read_whole(corpus.sources_file)
    if len(data) % 16:
        raise CorpusError(f"{corpus.sources_file.path}: {len(data)} bytes is no multiple of 16. It was cut short.")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
