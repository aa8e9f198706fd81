"""Layout: the base class of layouts."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from grain_sft.corpus import Corpus, RowFormat
from grain_sft.errors import LayoutError, RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.layout.checked_pieces import checked_pieces
from grain_sft.layout.pieces import LeftOut, Pieces, Span
from grain_sft.layout.traits import Traits
from grain_sft.registry import entry_errors, is_ours, name_of
from grain_sft.types import Bools, Integers, Ints

if TYPE_CHECKING:
    from jaxtyping import Int64

RECEIPT_VERSION = 2
"""Version of the hashes in receipts. Increase it if hashes cover other values, or are computed in another way."""

RowSegments = tuple[list[int], list[int]]
"""Segments of a row: the token offset of each segment in the corpus, and the number of its tokens."""

_BLOCK_ROWS = 1 << 16  # number of rows whose pieces are hashed, counted or searched at a time


class FromPieces(Traits):
    """Attributes and methods of a layout, with defaults that are computed from `pieces`."""

    row_format: RowFormat | None = None
    """Format of the rows that a `MaterializedLayout` reads from disk; None in all other layouts."""

    row_segments: Callable[[int], RowSegments] | None = None
    """Function of a row number that returns the row's segments; None if the layout has only `pieces`. If rows have few long
    segments, `NpyDataSource` calls this function instead of `pieces`."""

    @property
    def kind(self) -> str:
        """Name of the layout in reports and receipts; by default, `package.module:Name`."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @property
    def stream_key(self) -> str:
        """Text that is equal for layouts of one corpus whose joined rows are the same tokens. Lengths of rows may differ."""
        return repr(self)

    @property
    def mean_segments(self) -> float:
        """Mean number of segments in a row; by default, over at most 65,536 evenly spaced rows."""
        if self.one_segment:
            return 1.0
        rows = np.unique(np.linspace(0, len(self) - 1, min(len(self), _BLOCK_ROWS)).astype(np.int64))
        return len(self.pieces(rows).segment_begins) / len(rows)

    @property
    def statistics(self) -> dict[str, int]:
        """Counts over all rows: rows, tokens, padding (in tokens), segments, and max_segments (the most in one row)."""
        tokens = segments = most = 0
        for _, pieces in self._blocks():
            tokens += int(pieces.length.sum())
            row_of_segment = pieces.row[pieces.segment_begins]
            segments += len(row_of_segment)
            most = max(most, int(np.bincount(row_of_segment).max(initial=0)))
        padding = len(self) * self.sequence_length - tokens
        return {"rows": len(self), "tokens": tokens, "padding": padding, "segments": segments, "max_segments": most}

    def row_costs(self, rows: Int64[np.ndarray, " rows"] | None = None) -> Int64[np.ndarray, " rows"]:
        """Return the cost of attention of each of `rows`; None means all rows.

        A segment costs the square of its length, and a row costs the sum over its segments.
        """
        rows = np.arange(len(self)) if rows is None else rows
        costs = np.zeros(len(rows), np.int64)
        for first in range(0, len(rows), _BLOCK_ROWS):
            pieces = self.pieces(rows[first : first + _BLOCK_ROWS])
            begins = pieces.segment_begins
            lengths = np.add.reduceat(pieces.length, begins)
            np.add.at(costs, pieces.row[begins] + first, lengths**2)
        return costs

    def left_out(self) -> list[LeftOut]:
        """Return the lines of a report on left-out documents and tokens, and on padding; by default, only on padding."""
        return [("padding of rows", None, self.statistics["padding"])]

    def rows_of_documents(self, documents: Int64[np.ndarray, " documents"]) -> Int64[np.ndarray, " rows"]:
        """Return, ascending, the rows that have a token of one of `documents`.

        Raises:
          RowIndexError: A number is not in [0, num_documents).
          CorpusError, CorpusFileError: The documents cannot be found.
        """
        self._check_documents(documents)
        overlap = None if self.follows_documents else _overlap_with(self.corpus, documents)
        rows = [np.zeros(0, np.int64)]
        for first, pieces in self._blocks():
            if overlap is None:
                assert pieces.document is not None
                has_token = np.isin(pieces.document, documents)
            else:
                has_token = overlap(pieces)
            rows.append(pieces.row[has_token] + first)
        return np.unique(np.concatenate(rows))

    @property
    def _rows_receipt(self) -> str:
        """Text that changes if the rows change; by default, with a hash of all pieces.

        It is not a `functools.cached_property`, because `__init_subclass__` copies this property to subclasses. A class of
        a notebook is pickled with its attributes, and in Python 3.11, a cached property holds a lock, which can't be pickled.
        """
        if (cached := vars(self)).get("_rows_receipt") is None:
            columns = ([each.row + first, *each[1:5], *each.segments_and_positions] for first, each in self._blocks())
            cached["_rows_receipt"] = self._hash_of(columns)
        return str(cached["_rows_receipt"])

    def _hash_of(self, blocks: Iterable[Sequence[Integers]]) -> str:
        """Return a text with the number and the length of the rows, and a hash of the columns of all `blocks` of rows."""
        hashes: list[hashlib.blake2b] = []  # one for each column, so that the size of the blocks does not matter
        for columns in blocks:
            hashes = hashes or [hashlib.blake2b(digest_size=16) for _ in columns]
            for column_hash, column in zip(hashes, columns, strict=True):
                column_hash.update(np.ascontiguousarray(column, "<i8").view(np.uint8).data)
        joined = digest(" ".join(column_hash.hexdigest() for column_hash in hashes), 32)
        return f"{len(self)} {self.kind} rows of {self.sequence_length} tokens, {joined}"

    def _blocks(self) -> Iterator[tuple[int, Pieces]]:
        for first in range(0, len(self), _BLOCK_ROWS):
            yield first, self.pieces(np.arange(first, min(first + _BLOCK_ROWS, len(self))))

    def _check_documents(self, documents: Ints) -> None:
        wrong = documents[(documents < 0) | (documents >= self.num_documents)]
        if len(wrong):
            raise RowIndexError(f"document {wrong[0]}: expected 0 to {self.num_documents - 1}, the corpus's documents.")

    def __repr__(self) -> str:
        return self._rows_receipt


class Layout(FromPieces):
    """Spans of documents that make each row, as a pure function of a corpus and options.

    A layout is a subclass with three methods:
      `__init__(corpus, sequence_length, **options)`, which sets `corpus` and `sequence_length`;
      `__len__()`, the number of rows;
      `pieces(rows)`, the spans of tokens that make each of the rows, as arrays (see `Pieces`).
    `Traits` and `FromPieces` have defaults for the other attributes and methods. A layout overrides the defaults that
    do not fit its rows.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Adapt a subclass that defines `pieces`.

        The methods that describe rows become those of `FromPieces`, unless the subclass defines them. Otherwise, a
        subclass of `PackedLayout` would inherit `row_segments`, which reads the plan and ignores the new `pieces`.

        If the subclass is of another package, its pieces are checked. A check of the pieces of 32 rows takes 38 us.
        """
        super().__init_subclass__(**options)
        if "pieces" not in vars(cls):
            return
        for name, default in vars(FromPieces).items():
            describes_rows = name == "__repr__" or not name.startswith("__")
            if describes_rows and name not in vars(cls):
                setattr(cls, name, default)
        if not is_ours(cls):
            pieces = cls.pieces

            def checked(self: Self, rows: Ints) -> Pieces:
                """Return the checked pieces of `rows`. If `rows` is empty, ask for row 0: `pieces` may fail without rows."""
                asked = rows if len(rows) else np.zeros(1, np.int64)
                with entry_errors(LayoutError, f"{name_of(type(self))}.pieces", "Fix its code."):
                    columns = checked_pieces(pieces(self, asked), self, asked)
                return columns if len(rows) else Pieces._make([each if each is None else each[:0] for each in columns])

            cls.pieces = checked  # type: ignore[assignment]

    def spans(self, row: int) -> list[Span]:
        """Return the spans of `row`, in order.

        Raises:
          RowIndexError: `row` is not an integer in [0, len(layout)).
        """
        number = operator.index(row) if hasattr(row, "__index__") and not np.ndim(row) else -1
        if not 0 <= number < len(self):
            raise RowIndexError(f"row {row!r} of {self!r}: expected 0 to {len(self) - 1}.")
        pieces = self.pieces(np.array([number], np.int64))
        stop = pieces.start + pieces.length
        numbers = [-1] * len(stop) if pieces.document is None else pieces.document.tolist()
        documents = [None if number < 0 else number for number in numbers]
        return list(map(Span, pieces.shard.tolist(), pieces.start.tolist(), stop.tolist(), documents))

    @property
    def data_key(self) -> str:
        """Text of all that decides the rows, for the state of an iterator.

        In a layout of another package, `__repr__` may omit an option, so this text has a hash of the rows.
        """
        return repr(self) if is_ours(type(self)) else self._rows_receipt

    @property
    def parts(self) -> Mapping[str, Layout]:
        """In a mixture, the layout of each source, by source name. In any other layout, the layout itself under the name ""."""
        return {"": self}

    def split(self, rows: Ints) -> Iterator[tuple[str, Ints, Ints]]:
        """Yield (name, indices, row numbers) for each of `parts` that has some of `rows`.

        `indices`, int64 [n], are indices into `rows`. The row numbers, int64 [n], count from the first row of the part. If part
        "b" begins at row 20 of the mixture, rows [3, 25, 21] give ("b", [1, 2], [5, 1]).
        """
        yield "", np.arange(len(rows)), rows

    def first_document(self, part: str) -> int:
        """Return the number that the first document of a part has in this layout."""
        return 0

    @property
    def receipt(self) -> dict[str, str]:
        """Values or hashes of all that decides the rows, under the names `corpus` and `layout`."""
        corpus = self.corpus
        size = f"{corpus.num_tokens} {corpus.dtype.name} tokens in {len(corpus.shards)} shards"
        tokens = (self.finder or corpus.find_documents()).tokens_hash if self.follows_documents else None
        facts = filter(None, (size, corpus.ends_fingerprint, tokens))
        return {"corpus": ", ".join(facts), "layout": self._rows_receipt}

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {"rows": len(self), "tokens a row": self.sequence_length}
        facts["segments a row"] = f"{self.mean_segments:.2f} on average"
        facts["corpus"] = f"{self.corpus.num_tokens:,} tokens in {len(self.corpus.shards):,} shards"
        return html_facts(type(self).__name__, facts | {"options": repr(self)})


def _overlap_with(corpus: Corpus, documents: Ints) -> Callable[[Pieces], Bools]:
    """Return a function that maps pieces to a mask, bool [pieces], of those that have a token of `documents`."""
    start, length = corpus.documents.start[documents], corpus.documents.length[documents]
    start, length = start[length > 0], length[length > 0]
    order = np.argsort(start)  # some formats list documents in any order
    starts = start[order]
    # `ends[n]` is the greatest end of the first n documents in `starts`
    ends = np.append(0, np.maximum.accumulate((start + length)[order]))

    def overlap(pieces: Pieces) -> Bools:
        begin = pieces.start + corpus.shard_borders[pieces.shard]
        num_started = starts.searchsorted(begin + pieces.length)  # documents that start before each piece ends
        overlaps: Bools = ends[num_started] > begin
        return overlaps

    return overlap


def digest(text: str, digits: int = 16) -> str:
    """Return the first `digits` hexadecimal digits of the hash of a receipt's `text`."""
    return hashlib.sha256(f"grain_sft receipt {RECEIPT_VERSION}\0{text}".encode()).hexdigest()[:digits]
