"""Traits of a layout: facts about its corpus, documents and rows, with defaults."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.corpus import SOURCE_BYTES, Corpus, DocumentFinder, Documents, read_sources
from grain_sft.errors import LayoutError
from grain_sft.layout.pieces import Pieces
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.layout.packing import PackingOptions
    from grain_sft.layout.plan import Plan


_tables: weakref.WeakValueDictionary[Any, Ints] = weakref.WeakValueDictionary()  # results of `sources_of` that are in use


class Traits:
    """Base of layouts. All traits but `corpus`, `sequence_length`, `__len__` and `pieces` have defaults."""

    corpus: Corpus
    """Corpus whose tokens make the rows."""

    sequence_length: int
    """Number of columns of a row, padding included."""

    of_pairs: bool = False
    """Whether the rows are preference pairs. If not, `NpyDataSource` refuses a corpus of pairs."""

    takes_weights: bool = False
    """Whether the rows are mixed by `corpus.weights`. If not, `NpyDataSource` refuses a corpus with weights."""

    highest_token: int | None = None
    """Highest token id of the corpus if the search for documents read every token; else None."""

    follows_documents: bool = False
    """Whether `pieces` states the document of each piece."""

    finder: DocumentFinder | None = None
    """Finder of the documents that make the rows. None if the rows are made of `corpus.documents`, or if `follows_documents` is
    False."""

    one_segment: bool = False
    """Whether each row is one segment."""

    segment_names: Sequence[str] = ()
    """Names of the segments of every row, such as ("prompt", "chosen", "rejected"); empty if segments have no roles. Named
    segments after the first are answers to the first."""

    row_lengths: Sequence[int] = ()
    """Lengths of the rows, ascending; empty if all rows have `sequence_length` columns. All rows of a batch have one length."""

    row_counts: Sequence[int] = ()
    """Number of rows of each of `row_lengths`. With (30, 20), rows 0 to 29 have the first length, and 30 to 49 the second."""

    first_column: int = 0
    """Column of the whole row at which this layout's rows begin: 512 for the `ColumnsLayout` of columns 512 to 1023."""

    chunk_size: int = 1
    """Number of consecutive rows that an order moves together, such as 4 if rows are quarters of longer rows."""

    packing: PackingOptions | None = None
    """Options of the packing; None if the layout does not pack."""

    plans: Sequence[Plan] = ()
    """Plan of each epoch; empty if the layout does not pack."""

    epochs: int = 1
    """Number of epochs that the rows cover, one after the other; 1 if every epoch reads the same rows."""

    transforms: Sequence[Any] = ("shift_targets",)
    """Transforms that apply if a config names none. They are written as in a config."""

    needed_transforms: Sequence[Mapping[str, Any]] = ()
    """Those of `transforms` that carry out options of the layout, such as `mask_eod` for `eod_mask_loss`. If a config lists
    transforms of its own, the list must include transforms of these names."""

    orders_rows: bool = False
    """Whether rows are to be read by ascending number. If so, a config without `sampler.order` reads them in this order. By
    default, it reads them once; in a mixture, epoch after epoch."""

    def __len__(self) -> int:
        """Return the number of rows."""
        raise LayoutError(f"{type(self).__name__} has no method `__len__`. Define it: it returns the number of rows.")

    def pieces(self, rows: Int64[np.ndarray, " rows"]) -> Pieces:
        """Return the pieces of `rows`. Row numbers are in [0, len(layout))."""
        raise LayoutError(f"{type(self).__name__} has no method `pieces`. Define it: it returns the tokens of rows.")

    def width(self, rows: Int64[np.ndarray, " rows"]) -> int:
        """Return the number of columns of the arrays of `rows`. Row numbers are in [0, len(layout))."""
        return self.sequence_length

    @property
    def documents(self) -> Documents | None:
        """Documents that make the rows, indexed by `Pieces.document`; None if `follows_documents` is False."""
        if not self.follows_documents:
            return None
        return self.corpus.documents if self.finder is None else self.finder.documents

    @property
    def num_documents(self) -> int:
        """Number of `documents`, or of the corpus's documents if `documents` is None."""
        return len(self.documents or self.corpus.documents)

    @property
    def sources(self) -> Int64[np.ndarray, " documents"] | None:
        """int64 [documents, 2], number of the input file and of the line that each of `documents` comes from.

        The numbers are as in `Corpus.sources`.

        None if `corpus.sources` is None, or if `follows_documents` is False. With a `finder`, a document of the layout may
        begin inside a document of the corpus. Such a document has the source of the corpus's document.
        """
        sources = sources_of(self.corpus) if self.follows_documents else None
        if sources is None or self.finder is None or self.finder is self.corpus.find_documents():
            return sources
        by_start = self.corpus.documents.by_start()  # numbers of documents, by their first tokens
        holder = self.corpus.documents.start[by_start].searchsorted(self.finder.documents.start, side="right") - 1
        assert self.corpus.sources is not None
        return self.corpus.sources[by_start[np.maximum(holder, 0)]]

    def epoch_of(self, rows: Int64[np.ndarray, " rows"]) -> tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Return the epoch of each of `rows` (int64 [n]), counted from 0, and the row number in that epoch.

        With 2 epochs of 100 rows, row 130 is row 30 of epoch 1. Row 200, one past the last row, counts as row 0 of epoch 2.
        """
        return np.zeros(len(rows), np.int64), rows


def sources_of(corpus: Corpus) -> Ints | None:
    """Return `corpus.sources`. Skip the check that each document has an entry, because the check searches for documents.

    While a result is in use, as for one stage of a run, the same file is not read again.
    """
    file = corpus.sources_file
    if file is None or "sources" in vars(corpus):  # no file, or its content is cached and checked
        return corpus.sources
    table = _tables.get((file, file.version))
    if table is None:
        table = _tables[file, file.version] = read_sources(file, file.size // SOURCE_BYTES)
    return table
