"""MixtureLayout: the rows of several layouts, numbered one layout after the other."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from grain_sft.corpus.mixture import MixtureCorpus
from grain_sft.errors import LayoutError
from grain_sft.layout import Layout, Pieces, Span
from grain_sft.layout.html import html_layout
from grain_sft.layout.span import Range, spans_of

Ints = npt.NDArray[np.int64]


class MixtureLayout:
    """Rows of several layouts of one sequence length: first all of the first, then all of the second, and so on. Shards
    are numbered in the same way.

    Args:
      parts: by name; a source of a source is "outer/inner".

    Attributes:
      names, parts: of the layouts.
      first_rows, first_shards: of each, int64 [parts].

    Raises:
      LayoutError: no layout, or sequence lengths that differ.
    """

    def __init__(self, parts: Mapping[str, Layout]) -> None:
        lengths = {name: part.sequence_length for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            stated = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise LayoutError(f"the sources of a mixture have one sequence length, and these have {stated or 'none'}.")
        self.names, self.parts = tuple(parts), tuple(parts.values())
        self.sequence_length = self.parts[0].sequence_length
        self.corpus = MixtureCorpus.of(tuple(part.corpus for part in self.parts))
        ends = np.cumsum([len(part) for part in self.parts])
        shards = np.cumsum([len(part.corpus.shards) for part in self.parts])
        self.first_rows: Ints = np.append(0, ends[:-1])
        self.first_shards: Ints = np.append(0, shards[:-1])
        self._ends: Ints = ends

    def __len__(self) -> int:
        return int(self._ends[-1])

    @functools.cached_property
    def mean_segments(self) -> float:
        """Segments a row, on average over all rows."""
        return sum(len(part) * part.mean_segments for part in self.parts) / len(self)

    def parts_of(self, rows: Ints) -> Ints:
        """Which layout each row (int64 [n]) is of."""
        return self._ends.searchsorted(rows, side="right")

    def split(self, rows: Ints) -> Iterator[tuple[int, Ints, Ints]]:
        """The layouts that some rows (int64 [n]) are of: (number, which of the rows, and their own numbers in it)."""
        part = self.parts_of(rows)
        for number in np.unique(part).tolist():
            at = np.flatnonzero(part == number)
            yield number, at, rows[at] - self.first_rows[number]

    def spans(self, row: int) -> list[Span]:
        """What row `row` holds; documents are numbered in their own corpus.

        Raises:
          RowIndexError: no such row.
        """
        return spans_of(self, row)

    def ranges(self, row: int) -> list[Range]:
        """The same, of a row in range."""
        part = int(self._ends.searchsorted(row, side="right"))
        first = int(self.first_shards[part])
        found = self.parts[part].ranges(row - int(self.first_rows[part]))
        return [(shard + first, start, stop, document) for shard, start, stop, document in found]

    def pieces(self, rows: Ints) -> Pieces:
        """The spans of all `rows` (int64 [rows], each in range)."""
        found: list[Pieces] = []
        for number, at, own in self.split(rows):
            some = self.parts[number].pieces(own)
            segment = np.ones(len(some.row), np.int64) if some.segment is None else some.segment
            position = np.zeros(len(some.row), np.int64) if some.position is None else some.position
            shard = some.shard + self.first_shards[number]
            found.append(Pieces(at[some.row], some.column, shard, some.start, some.length, segment, position))
        if not found:
            return self.parts[0].pieces(rows)
        joined = [np.concatenate(columns) for columns in zip(*found, strict=True)]
        order = np.argsort(joined[0], kind="stable")
        return Pieces(*(column[order] for column in joined))

    def _repr_html_(self) -> str:
        return html_layout(self)

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {part!r}" for name, part in zip(self.names, self.parts, strict=True))
        return f"MixtureLayout({{{parts}}})"
