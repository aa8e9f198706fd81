"""MixtureLayout: one layout that has the rows of several layouts."""

import functools
import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from grain_sft.corpus import Documents, MixtureCorpus
from grain_sft.errors import LayoutError
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import LeftOut, Pieces, groups, join_parts
from grain_sft.layout.run_documents import parts_by_documents, split_documents
from grain_sft.types import Ints


class MixtureLayout(Layout):
    """Rows of several layouts of one sequence length, numbered layout after layout.

    If the first layout has 20 rows, row 0 of the second layout is row 20. Shards are numbered in the same way. Documents are
    numbered first in the layouts with `follows_documents`, then in the others.

    Args:
      parts: Layouts by the names of their sources. In a mixture of mixtures, a name is "outer/inner".

    Attributes:
      names: Names of the sources.
      first_rows: int64 [parts], number of the first row of each layout.
      first_shards: int64 [parts], number of the first shard of each layout.

    Raises:
      LayoutError: `parts` is empty, a source has no name, sequence lengths differ, or a layout has rows of several lengths. Or
        preference pairs are mixed with other rows, or with pairs that have another prompt length or padding.
    """

    kind = "mixture"
    parts: Mapping[str, Layout] = {}  # replaces a property of `Layout`

    def __init__(self, parts: Mapping[str, Layout]) -> None:
        lengths = {name: part.sequence_length for name, part in parts.items()}
        if len(set(lengths.values())) != 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise LayoutError(f"mixture: expected one sequence length, found {listed or 'none'}. Make them equal.")
        if "" in parts:
            raise LayoutError("a source of a mixture has no name. Give each source a name that is not empty.")
        if names := [name for name, part in parts.items() if part.row_lengths]:
            raise LayoutError(f"source {names[0]} has rows of several lengths. Give it a layout of rows of one length.")
        of_pairs = [part.of_pairs for part in parts.values()]
        # layouts of pairs state their prompt length and their padding in `transforms`
        transforms = {name: str(part.transforms) for name, part in parts.items()}
        if any(of_pairs) and (not all(of_pairs) or len(set(transforms.values())) > 1):
            listed = ", ".join(f"{name}: {text}" for name, text in transforms.items())
            expected = "preference pairs in all sources, with one prompt_length and one pad_token_id, or in no source"
            raise LayoutError(f"mixture: expected {expected}. The sources have the transforms {listed}.")
        self.parts, self.names, self._layouts = dict(parts), tuple(parts), tuple(parts.values())
        first = self._layouts[0]
        self.sequence_length, self.transforms = first.sequence_length, first.transforms
        self.of_pairs, self.segment_names = first.of_pairs, first.segment_names
        self.corpus = MixtureCorpus.of(tuple(part.corpus for part in self._layouts))
        self.follows_documents = any(part.follows_documents for part in self._layouts)
        self._ends: Ints = np.cumsum([len(part) for part in self._layouts])
        self.first_rows: Ints = np.append(0, self._ends[:-1])
        self.first_shards: Ints = np.cumsum([0, *(len(part.corpus.shards) for part in self._layouts)])[:-1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def first_document(self, part: str) -> int:
        before = itertools.takewhile(lambda item: item[0] != part, parts_by_documents(self))
        return sum(layout.num_documents for _, layout in before)

    @functools.cached_property
    def _first_documents(self) -> list[int]:
        """Number of the first document of each part; 0 for a part that does not follow documents."""
        return [self.first_document(name) if part.follows_documents else 0 for name, part in self.parts.items()]

    @property
    def documents(self) -> Documents | None:
        """Documents of the parts that follow documents, in the order of the parts; None if no part does."""
        if not self.follows_documents:
            return None
        # each part, with the token offset of its first shard in the mixture
        parts = zip(self._layouts, self.corpus.shard_borders[self.first_shards], strict=True)
        found = [(own.start + first, own.length) for part, first in parts if (own := part.documents) is not None]
        start, length = map(np.concatenate, zip(*found, strict=True))
        return Documents(start, length)

    @property
    def num_documents(self) -> int:
        return sum(part.num_documents for part in self._layouts)

    def parts_of(self, rows: Ints) -> Ints:
        """Return the number of the layout that each of `rows` belongs to, int64 [n]."""
        return self._ends.searchsorted(rows, side="right")

    def split(self, rows: Ints) -> Iterator[tuple[str, Ints, Ints]]:
        for number, index in groups(self.parts_of(rows)):
            yield self.names[number], index, rows[index] - self.first_rows[number]

    def pieces(self, rows: Ints) -> Pieces:
        """Return the pieces of the parts, with the mixture's numbers of shards and documents."""

        def columns_of(number: int, index: Ints) -> tuple[Ints, ...]:
            pieces = self._layouts[number].pieces(rows[index] - self.first_rows[number])
            shard = pieces.shard + self.first_shards[number]
            document = np.full(len(pieces.row), -1, np.int64)
            if pieces.document is not None:
                document = np.where(pieces.document < 0, -1, pieces.document + self._first_documents[number])
            return (pieces.row, pieces.column, shard, pieces.start, pieces.length, *pieces.segments_and_positions, document)

        return Pieces(*join_parts(self.parts_of(rows), columns_of))

    def rows_of_documents(self, documents: Ints) -> Ints:
        rows, num_found = [np.zeros(0, np.int64)], 0
        for name, part, _, own in split_documents(self, documents):
            rows.append(part.rows_of_documents(own) + self.first_rows[self.names.index(name)])
            num_found += len(own)
        if num_found < len(documents):  # only then: the check counts all documents, which may read all tokens
            self._check_documents(documents)
        return np.unique(np.concatenate(rows))

    def left_out(self) -> list[LeftOut]:
        lines = ((name, line) for name, part in self.parts.items() for line in part.left_out())
        return [(f"{name}: {what}", documents, tokens) for name, (what, documents, tokens) in lines]

    @property
    def receipt(self) -> dict[str, str]:
        """Receipt of each source, under the keys "corpus of NAME" and "layout of NAME"."""
        return {f"{key} of {name}": text for name, part in self.parts.items() for key, text in part.receipt.items()}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name!r}: {part!r}" for name, part in self.parts.items())
        return f"MixtureLayout({{{parts}}})"
