"""Layout: the spans of documents that make each row."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from grain_sft.errors import RowIndexError
from grain_sft.html_table import html_facts
from grain_sft.layout.from_pieces import FromPieces
from grain_sft.layout.pieces import Ints, Pieces, Span


class Layout(FromPieces):
    """Spans of documents that make each row, as a pure function of a corpus and options.

    A layout is a subclass with three methods:
      `__init__(corpus, sequence_length, **options)`, which sets `corpus` and `sequence_length`;
      `__len__()`, the number of rows;
      `pieces(rows)`, the tokens of each row.
    Everything else has a default. A layout sets the attributes of `Traits` that differ, and may override those of `FromPieces`,
    which follow from its pieces, by faster ones.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Adapt a class that defines `pieces`.

        If its base is a layout with other pieces, such as `PackedLayout`, the overrides of `FromPieces` in the base describe
        those. The class gets the defaults instead, which read its own pieces. Pieces of a class of another package are
        checked: 38 us for 32 rows.
        """
        super().__init_subclass__(**options)
        if "pieces" not in vars(cls):
            return
        for name, default in FromPieces.defaults().items():
            if name not in vars(cls):
                setattr(cls, name, default)
        if not cls.__module__.startswith("grain_sft."):
            cls.pieces = _checked(cls.pieces)  # type: ignore[method-assign]

    def spans(self, row: int) -> list[Span]:
        """Return the spans of `row`, in order.

        Raises:
          RowIndexError: `row` is not in [0, len(layout)).
        """
        if not 0 <= row < len(self):
            raise RowIndexError(f"row {row} of {self!r}: expected 0 to {len(self) - 1}.")
        pieces = self.pieces(np.array([operator.index(row)], np.int64))
        stop = pieces.start + pieces.length
        documents: list[int | None] = [None] * len(stop)
        if pieces.document is not None:
            documents = [None if number < 0 else number for number in pieces.document.tolist()]
        return list(map(Span, pieces.shard.tolist(), pieces.start.tolist(), stop.tolist(), documents))

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
    def receipt(self) -> dict[str, str]:
        """Values or hashes of all that decides the rows, under the names `corpus` and `layout`."""
        corpus = self.corpus
        facts = [f"{corpus.num_tokens} {corpus.dtype.name} tokens in {len(corpus.shards)} shards"]
        for fingerprint in (corpus.ends_fingerprint, self._tokens_hash()):
            if fingerprint:
                facts.append(fingerprint)
        return {"corpus": ", ".join(facts), "layout": self._rows_receipt}

    def _tokens_hash(self) -> str | None:
        """Return the hash of all tokens if the layout follows documents that the corpus finds by EOS alone, else None."""
        return self.corpus.documents.tokens if self.follows_documents else None

    def _repr_html_(self) -> str:
        facts: dict[str, Any] = {"rows": len(self), "tokens a row": self.sequence_length}
        facts["segments a row"] = f"{self.mean_segments:.2f} on average"
        facts["corpus"] = f"{self.corpus.num_tokens:,} tokens in {len(self.corpus.shards):,} shards"
        return html_facts(type(self).__name__, facts | {"options": repr(self)})


def _checked(pieces: Callable[[Any, Ints], Pieces]) -> Any:
    """Return the method `pieces` with a check of what it returns."""

    @functools.wraps(pieces)
    def checked(layout: Layout, rows: Ints) -> Pieces:
        """Return the pieces of `rows`; raise a `LayoutError` if a reader could not fill the rows from them."""
        return Pieces.checked(pieces(layout, rows), layout, rows)

    return checked
