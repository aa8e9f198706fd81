"""MixtureLayout: the rows of several layouts, numbered one layout after the other."""

import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from grain_sft.corpus import Documents, MixtureCorpus
from grain_sft.errors import LayoutError
from grain_sft.layout.from_pieces import LeftOut
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import Ints, Pieces, join_parts
from grain_sft.layout.run_documents import parts_by_documents, split_documents


class MixtureLayout(Layout):
    """Rows of several layouts of one sequence length, numbered layout after layout. Shards, and the documents of layouts that
    follow documents, are numbered in the same way.

    Args:
      parts: Layouts by the names of their sources; a source of a source is "outer/inner".

    Attributes:
      parts: Layouts by name.
      first_rows, first_shards: int64 [parts], number of the first row and of the first shard of each.

    Raises:
      LayoutError: There is no layout, one has no name, sequence lengths differ, or preference pairs are mixed with rows of
        another shape.
    """

    kind = "mixture"
    parts: Mapping[str, Layout] = {}

    def __init__(self, parts: Mapping[str, Layout]) -> None:
        lengths = {name: part.sequence_length for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            stated = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise LayoutError(f"the sources of a mixture have one sequence length, and these have {stated or 'none'}.")
        if "" in parts:
            raise LayoutError("a source of a mixture has no name. Give it one that is not empty.")
        if names := [name for name, part in parts.items() if part.row_lengths]:
            raise LayoutError(
                f"source {names[0]} has rows of several lengths, each in batches of its own, but a mixture's batches hold "
                "rows of all sources. Take another layout."
            )
        of_pairs = {part.of_pairs for part in parts.values()}
        if True in of_pairs and (len(of_pairs) > 1 or len({repr(part.transforms) for part in parts.values()}) > 1):
            stated = ", ".join(f"{name}: {part.transforms}" for name, part in parts.items())
            raise LayoutError(
                "either all sources of a mixture are preference pairs, with one prompt_length and one pad_token_id, or none "
                f"is. The transforms of these are {stated}."
            )
        self.parts, self._layouts = dict(parts), tuple(parts.values())
        self.sequence_length, self.transforms = self._layouts[0].sequence_length, self._layouts[0].transforms
        self.corpus = MixtureCorpus.of(tuple(part.corpus for part in self._layouts))
        self.of_pairs, self.segment_names = self._layouts[0].of_pairs, self._layouts[0].segment_names
        self.follows_documents = any(part.follows_documents for part in self._layouts)
        self._ends: Ints = np.cumsum([len(part) for part in self._layouts])
        self.first_rows: Ints = np.append(0, self._ends[:-1])
        self.first_shards: Ints = np.cumsum([0, *(len(part.corpus.shards) for part in self._layouts)])[:-1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(self.parts)

    @functools.cached_property
    def mean_segments(self) -> float:
        return sum(len(part) * part.mean_segments for part in self._layouts) / len(self)

    def first_document(self, part: str) -> int:
        before = itertools.takewhile(lambda item: item[0] != part, parts_by_documents(self))
        return sum(layout.num_documents for _, layout in before)

    @functools.cached_property
    def _first_documents(self) -> list[int]:
        return [self.first_document(name) if part.follows_documents else 0 for name, part in self.parts.items()]

    @property
    def documents(self) -> Documents | None:
        """Documents of the parts that follow documents, one part after the other."""
        if not self.follows_documents:
            return None
        starts, lengths, before = [], [], 0
        for part in self._layouts:
            if (documents := part.documents) is not None:
                starts.append(documents.start + before)
                lengths.append(documents.length)
            before += part.corpus.num_tokens
        return Documents(np.concatenate(starts), np.concatenate(lengths))

    @property
    def num_documents(self) -> int:
        """Number of the documents of all parts."""
        return sum(part.num_documents for part in self._layouts)

    def parts_of(self, rows: Ints) -> Ints:
        """Return the part of each of `rows`, int64 [n]."""
        return self._ends.searchsorted(rows, side="right")

    def split(self, rows: Ints) -> Iterator[tuple[str, Ints, Ints]]:
        part, names = self.parts_of(rows), self.names
        for number in np.unique(part).tolist():
            index = np.flatnonzero(part == number)
            yield names[number], index, rows[index] - self.first_rows[number]

    def pieces(self, rows: Ints) -> Pieces:
        """See `Layout.pieces`. Shards and documents are numbered through all sources."""

        def columns_of(number: int, index: Ints) -> tuple[Ints, ...]:
            found = self._layouts[number].pieces(rows[index] - self.first_rows[number])
            document = np.full(len(found.row), -1, np.int64)
            if found.document is not None:
                document = np.where(found.document < 0, -1, found.document + self._first_documents[number])
            shard = found.shard + self.first_shards[number]
            return (found.row, found.column, shard, found.start, found.length, *found.segment_columns, document)

        return Pieces(*join_parts(self.parts_of(rows), columns_of)) if len(rows) else self._layouts[0].pieces(rows)

    def rows_of_documents(self, documents: Ints) -> Ints:
        """Return the rows that hold a token of `documents`, int64 [n]. Documents of parts that follow documents come first.
        Those of the other parts are counted, which may read all of their tokens, only if `documents` has one of them."""
        found, known = [np.zeros(0, np.int64)], 0
        for name, part, _, own in split_documents(self, documents):
            found.append(part.rows_of_documents(own) + self.first_rows[self.names.index(name)])
            known += len(own)
        if known < len(documents):
            self._check_documents(documents)
        return np.unique(np.concatenate(found))

    def left_out(self) -> list[LeftOut]:
        lines = [(name, line) for name, part in self.parts.items() for line in part.left_out()]
        return [(f"{name}: {what}", documents, tokens) for name, (what, documents, tokens) in lines]

    @property
    def receipt(self) -> dict[str, str]:
        """What decides the rows of each part, by "corpus of NAME" and "layout of NAME"."""
        return {f"{key} of {name}": text for name, part in self.parts.items() for key, text in part.receipt.items()}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {part!r}" for name, part in self.parts.items())
        return f"MixtureLayout({{{parts}}})"
