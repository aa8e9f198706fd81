"""Layout: the spans of documents that make each row."""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus, Documents, RowFormat
from grain_sft.errors import CorpusError, LayoutError, RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.layout.pieces import Ints, Pieces, Span
from grain_sft.storage import read_whole

if TYPE_CHECKING:
    from jaxtyping import Int64

    from grain_sft.layout.packing import PackingOptions
    from grain_sft.layout.plan import Plan

RECEIPT_VERSION = 2
"""Version of the content and method of receipt hashes; part of every hash."""

_OF_PIECES = {"kind", "left_out", "mean_segments", "row_begin", "row_costs", "row_format", "row_segments", "stream_key"}
_OF_PIECES |= {"__repr__", "_rows_receipt", "rows_of_documents", "statistics"}
"""Attributes that follow from `pieces`. A class from outside that defines `pieces` has the defaults, not those of its base."""

_BLOCK_ROWS = 1 << 16  # rows whose pieces are hashed, counted or searched at a time

LeftOut = tuple[str, int | None, int | None]
"""What no row holds, in words, and its numbers of documents and of tokens; None for a number that is not counted."""


class Layout(Protocol):
    """Spans of documents that make each row, as a pure function of a corpus and options.

    Inherit from this class: a layout defines `__init__(corpus, sequence_length, **options)`, which sets `corpus` and
    `sequence_length`, `__len__` and `pieces`. Everything else has a default, which a layout may override.

    Attributes:
      corpus: Corpus whose tokens make the rows.
      sequence_length: Tokens of a row, padding included.
      first_column: Column of the whole row that is column 0 here; 0 except in a `ColumnsLayout`.
      kind: Name of the layout in reports; `package.module:Name` for a class from another package.
      follows_documents: Whether `pieces` names the document of each piece.
      one_segment: Whether each row is one segment.
      epochs: Number of epochs that the rows make up if each epoch is packed anew; else 1.
      plans: Plan of each epoch; empty if the layout does not pack.
      packing: Options of the packing; None if the layout does not pack.
      row_format: Format of stored rows (tokens, positions and segments); None if rows are assembled when read.
      row_segments: Function of a row number that returns two lists: the first token of each segment, counted through the
        corpus, and its length. Readers call it for rows of few long segments; None in a layout that has `pieces` alone.
      row_begin: Function of a row number that returns the number of segments before those of `row_segments` in the whole row,
        and the position of their first token in its segment; None where both are 0 in every row.
      highest_token: Highest token id of the corpus, if the search for documents read all tokens; else None.
      of_pairs: Whether the rows are preference pairs. No other layout may read a corpus of pairs.
      takes_weights: Whether the rows follow `corpus.weights`. No other layout may read a corpus that has some.
      segment_names: Names of the segments 1, 2, … of each row; empty if a segment is any document. The first is a prompt, and
        the others are responses to it, which are shown next to each other.
      row_lengths: Ascending lengths of the rows, if each batch has rows of one of these lengths; empty if all rows have
        `sequence_length` columns.
      row_counts: Number of rows of each of `row_lengths`; the rows are numbered in that order.
      chunk_size: Number of consecutive rows that an order keeps together, as parts of one longer row.
      orders_rows: Whether rows are meant to be read once, in the order of their numbers. A config does so by default.
      transforms: Default transforms of a config, by their names in configs.
    """

    corpus: Corpus
    sequence_length: int
    first_column: int = 0
    follows_documents: bool = False
    one_segment: bool = False
    epochs: int = 1
    packing: PackingOptions | None = None
    row_format: RowFormat | None = None
    row_segments: Callable[[int], tuple[list[int], list[int]]] | None = None
    row_begin: Callable[[int], tuple[int, int]] | None = None
    plans: Sequence[Plan] = ()
    highest_token: int | None = None
    of_pairs: bool = False
    takes_weights: bool = False
    segment_names: Sequence[str] = ()
    row_lengths: Sequence[int] = ()
    row_counts: Sequence[int] = ()
    chunk_size: int = 1
    orders_rows: bool = False
    transforms: Sequence[Any] = ("shift_targets",)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (pieces := vars(cls).get("pieces")) and not cls.__module__.startswith("grain_sft."):
            for name in _OF_PIECES.difference(vars(cls)):
                setattr(cls, name, vars(Layout)[name])
            cls.pieces = lambda self, rows: Pieces.checked(pieces(self, rows), self, rows)  # type: ignore[method-assign]

    def __len__(self) -> int:
        """Return the number of rows."""

    def pieces(self, rows: Int64[np.ndarray, " rows"]) -> Pieces:
        """Return the pieces of `rows`, each in [0, len(layout))."""
        raise LayoutError(f"{self.kind} has no method `pieces`. Define it: batches, spans and receipts are made of it.")

    def width(self, rows: Int64[np.ndarray, " rows"]) -> int:
        """Return the number of columns of the arrays of `rows`, each in [0, len(layout))."""
        return self.sequence_length

    @property
    def stream_key(self) -> str:
        """Text that is equal for two layouts of one corpus if their rows are the same tokens in the same order."""
        return repr(self)

    @property
    def kind(self) -> str:
        return f"{type(self).__module__}:{type(self).__qualname__}"

    def spans(self, row: int) -> list[Span]:
        """Return the spans of `row`, in order.

        Raises:
          RowIndexError: `row` is not in [0, len(layout)).
        """
        if not 0 <= row < len(self):
            raise RowIndexError(f"row {row} of {self!r}: expected 0 to {len(self) - 1}.")
        found = self.pieces(np.array([operator.index(row)], np.int64))
        stop, count = found.start + found.length, len(found.row)
        numbers = [None] * count if found.document is None else [None if d < 0 else d for d in found.document.tolist()]
        return list(map(Span, found.shard.tolist(), found.start.tolist(), stop.tolist(), numbers))

    @property
    def mean_segments(self) -> float:
        """Mean number of segments in a row; by default, over at most 65,536 evenly spaced rows."""
        if self.one_segment:
            return 1.0
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), _BLOCK_ROWS)).astype(np.int64))
        return len(self.pieces(rows).segment_begins) / len(rows)

    @property
    def documents(self) -> Documents | None:
        """Documents that make the rows, indexed by `Pieces.document`; None if the layout does not follow documents."""
        return self.corpus.documents if self.follows_documents else None

    @property
    def num_documents(self) -> int:
        """Number of `documents`, or of the corpus's documents if the layout does not follow documents."""
        return len(self.documents or self.corpus.documents)

    @property
    def sources(self) -> Int64[np.ndarray, " documents"] | None:
        """int64 [documents, 2]: numbers of the input and of the line of each of `documents`; None if the corpus lacks them."""
        return sources_of(self.corpus) if self.follows_documents else None

    def rows_of_documents(self, documents: Int64[np.ndarray, " documents"]) -> Int64[np.ndarray, " rows"]:
        """Return the ascending numbers of the rows with a token of `documents`, int64 [n] in [0, num_documents).

        Raises:
          RowIndexError: A number is not in [0, num_documents).
          CorpusError, CorpusFileError: The documents cannot be found.
        """
        self._check_documents(documents)
        found = [np.zeros(0, np.int64)]
        if not self.follows_documents:
            starts, lengths = (column[documents] for column in self.corpus.documents)
            order = np.flatnonzero(lengths)[np.argsort(starts[lengths > 0])]  # some formats list documents in any order
            starts, ends = starts[order], np.append(0, np.maximum.accumulate((starts + lengths)[order]))
            begins = np.cumsum([0, *(shard.num_tokens for shard in self.corpus.shards)])
        for first, pieces in self._blocks():
            if self.follows_documents:
                assert pieces.document is not None
                wanted = np.isin(pieces.document, documents)
            else:
                start = pieces.start + begins[pieces.shard]
                wanted = ends[starts.searchsorted(start + pieces.length)] > start
            found.append(pieces.row[wanted] + first)
        return np.unique(np.concatenate(found))

    def epoch_of(
        self, rows: Int64[np.ndarray, " rows"]
    ) -> tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
        """Return the epoch, from 0, that each of `rows` (int64 [n]) was packed for, and its row number in that epoch. Where
        each epoch is packed anew, `len(self)` is row 0 of the epoch after the last."""
        return np.zeros(len(rows), np.int64), rows

    @property
    def parts(self) -> Mapping[str, Layout]:
        """Layouts of a mixture, by source name; any other layout is its own only part, named ""."""
        return {"": self}

    def split(self, rows: Ints) -> Iterator[tuple[str, Ints, Ints]]:
        """Yield for each part with some of `rows` (int64 [n]): its name, indices into `rows`, and row numbers in the part."""
        yield "", np.arange(len(rows)), rows

    def first_document(self, part: str) -> int:
        """Return the number, in this layout, of the first document of a part."""
        return 0

    @property
    def statistics(self) -> dict[str, int]:
        """Counts over all rows: rows, tokens, padding (in tokens), segments, and max_segments (the most in one row)."""
        tokens = segments = most = 0
        for _, pieces in self._blocks():
            tokens += int(pieces.length.sum())
            firsts = pieces.row[pieces.segment_begins]
            segments += len(firsts)
            most = max(most, int(np.bincount(firsts).max(initial=0)))
        padding = len(self) * self.sequence_length - tokens
        return {"rows": len(self), "tokens": tokens, "padding": padding, "segments": segments, "max_segments": most}

    def row_costs(self, rows: Int64[np.ndarray, " rows"] | None = None) -> Int64[np.ndarray, " rows"]:
        """Return the cost of attention of each of `rows` (None means all): the sum of the squares of its segments' lengths."""
        rows = np.arange(len(self)) if rows is None else rows
        costs = np.zeros(len(rows), np.int64)
        for first in range(0, len(rows), _BLOCK_ROWS):
            pieces = self.pieces(rows[first : first + _BLOCK_ROWS])
            begins = pieces.segment_begins
            np.add.at(costs, pieces.row[begins] + first, np.add.reduceat(pieces.length, begins) ** 2)
        return costs

    def left_out(self) -> list[LeftOut]:
        """Return the documents and tokens that no row holds, and the padding of the rows."""
        return [("padding of rows", None, self.statistics["padding"])]

    @property
    def receipt(self) -> dict[str, str]:
        """Values or hashes of all that decides the rows, under the names `corpus` and `layout`."""
        corpus = self.corpus
        stated = [f"{corpus.num_tokens} {corpus.dtype.name} tokens in {len(corpus.shards)} shards"]
        stated += filter(None, [corpus.ends_fingerprint, self._tokens_hash()])
        return {"corpus": ", ".join(stated), "layout": self._rows_receipt}

    def _tokens_hash(self) -> str | None:
        """Return the hash of all tokens if the layout follows documents that the corpus finds by EOS alone, else None."""
        return self.corpus.documents.tokens if self.follows_documents else None

    @functools.cached_property
    def _rows_receipt(self) -> str:
        """Hash of the rows' pieces; the options of a layout whose options decide its rows."""
        columns = (
            [found.row + first, found.column, found.shard, found.start, found.length, *found.segment_columns]
            for first, found in self._blocks()
        )
        return self._hash_of(columns)

    def _hash_of(self, blocks: Iterable[Sequence[npt.NDArray[np.integer]]]) -> str:
        """Return a text with the number and length of the rows and a hash of the columns in `blocks`."""
        digests: list[hashlib.blake2b] = []  # one per column, independent of the size of blocks
        for columns in blocks:
            digests = digests or [hashlib.blake2b(digest_size=16) for _ in columns]
            for each, column in zip(digests, columns, strict=True):
                each.update(np.ascontiguousarray(column, "<i8").view(np.uint8).data)
        joined = digest(" ".join(each.hexdigest() for each in digests), 32)
        return f"{len(self)} {self.kind} rows of {self.sequence_length} tokens, {joined}"

    def _blocks(self) -> Iterator[tuple[int, Pieces]]:
        """Yield the first row number and the pieces of each block of rows."""
        for first in range(0, len(self), _BLOCK_ROWS):
            yield first, self.pieces(np.arange(first, min(first + _BLOCK_ROWS, len(self))))

    def _check_documents(self, documents: Ints) -> None:
        wrong = documents[(documents < 0) | (documents >= self.num_documents)]
        if len(wrong):
            raise RowIndexError(f"document {wrong[0]}: expected 0 to {self.num_documents - 1}, the corpus's documents.")

    def __repr__(self) -> str:
        """The rows' number, length and hash. A layout that states its options instead needs no hash."""
        return self._rows_receipt

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {"rows": len(self), "tokens a row": self.sequence_length}
        facts["segments a row"] = f"{self.mean_segments:.2f} on average"
        facts["corpus"] = f"{self.corpus.num_tokens:,} tokens in {len(self.corpus.shards):,} shards"
        return html_facts(type(self).__name__, facts | {"options": repr(self)})


def digest(text: str, digits: int = 16) -> str:
    """Return the first `digits` hexadecimal digits of the hash of a receipt's `text`."""
    return hashlib.sha256(f"grain_sft receipt {RECEIPT_VERSION}\0{text}".encode()).hexdigest()[:digits]


def sources_of(corpus: Corpus) -> Ints | None:
    """Return `corpus.sources`, without a search for documents."""
    if corpus.sources_file is None or "sources" in vars(corpus):
        return corpus.sources
    data = read_whole(corpus.sources_file)
    if len(data) % 16:
        raise CorpusError(f"{corpus.sources_file.path}: {len(data)} bytes is not a multiple of 16. It was cut short.")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
