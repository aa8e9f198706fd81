"""RunDocuments: numbers of the documents of a run, through all its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from grain_sft.corpus import Documents
from grain_sft.layout.layout import Layout, parts_by_documents, split_documents
from grain_sft.layout.pieces import Ints


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Numbers of the documents of one part of a layout, from `first` on."""

    layout: Layout
    name: str
    part: Layout
    first: int


class RunDocuments:
    """Numbers of the documents of a run, as a trace prints them.

    The documents of the first stage have the numbers of its layout. After them come, stage by stage, the documents that no
    earlier stage reads. So a stage that is added to a run changes no number. A layout that does not follow documents takes as
    many numbers as its corpus has tokens, since only a search through these tokens may count its documents.

    Args:
      layouts: Layout of each stage, in order. Stages may share one.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple({id(each): each for each in layouts}.values())
        self._places: list[list[_Place]] = []  # of the parts of each layout, which earlier layouts may have
        distinct: list[_Place] = []
        end = 0
        for layout in self.layouts if len(self.layouts) > 1 else ():
            earlier: tuple[_Place, ...] = tuple(distinct)
            places: list[_Place] = []
            for name, part in parts_by_documents(layout):
                same = [each for each in earlier if _same_documents(each.part, part)]
                if same:  # a mixture may name a corpus twice: by its name, else one that no other part has
                    taken = {id(each) for each in places} | {id(each) for each in same if each.name in layout.parts}
                    place = min(same, key=lambda each: (each.name != name, id(each) in taken))
                else:
                    place = _Place(layout, name, part, end)
                    distinct.append(place)
                    end += part.num_documents if part.follows_documents else part.corpus.num_tokens
                places.append(place)
            self._places.append(places)
        self._end_of_first = next((each.first for each in distinct if each.layout is not self.layouts[0]), end)

    @property
    def parts(self) -> Iterator[tuple[str, Layout, Layout]]:
        """Layouts of one corpus each: the name in a mixture, the layout, and the layout of its stage. No two have the same
        documents, unless one stage has both."""
        if len(self.layouts) == 1:
            yield from ((name, part, self.layouts[0]) for name, part in self.layouts[0].parts.items())
        for layout, places in zip(self.layouts, self._places, strict=False):
            yield from ((each.name, each.part, layout) for each in places if each.layout is layout)

    def of(self, layout: Layout, documents: Ints) -> Ints:
        """Return the numbers in the run of `documents` of a layout, int64 [n]; -1 stays."""
        if layout is self.layouts[0]:
            return documents
        found = np.full_like(documents, -1)
        for (_, _, here, own), place in zip(split_documents(layout, documents), self._places_of(layout), strict=False):
            found[here] = own + self._first(place)
        return found

    def within(self, layout: Layout, documents: Ints) -> Ints:
        """Return the numbers in a layout of those `documents` of the run that it has, int64 [n], ascending."""
        if len(self.layouts) == 1:
            return documents
        if layout is self.layouts[0]:
            return documents[documents < self._end_of_first]
        found = [documents[:0]]
        for (name, part), place in zip(parts_by_documents(layout), self._places_of(layout), strict=True):
            own = documents[documents >= self._first(place)] - self._first(place)
            if len(own):
                found.append(own[own < part.num_documents] + layout.first_document(name))
        return np.unique(np.concatenate(found))

    def _places_of(self, layout: Layout) -> list[_Place]:
        return next(places for each, places in zip(self.layouts, self._places, strict=True) if each is layout)

    def _first(self, place: _Place) -> int:
        return place.first if place.layout is not self.layouts[0] else place.layout.first_document(place.name)


def _same_documents(one: Layout, other: Layout) -> bool:
    """Return whether layouts have the same documents of the same files. Only one that follows documents has tokens read."""
    corpus, its_corpus = one.corpus, other.corpus
    if [shard.path for shard in corpus.shards] != [shard.path for shard in its_corpus.shards]:
        return False
    if not (one.follows_documents or other.follows_documents):
        found, its = ((each.eos_token_id, each.has_boundary_files) for each in (corpus, its_corpus))
        return found == its
    documents, its_documents = _documents(one), _documents(other)
    if documents is None or its_documents is None:
        return False
    return documents is its_documents or all(map(np.array_equal, documents, its_documents))


def _documents(layout: Layout) -> Documents | None:
    """Return the documents of a layout's rows, or of its corpus; None where neither files nor EOS tell where they end."""
    known = layout.follows_documents or layout.corpus.has_boundary_files or layout.corpus.eos_token_id is not None
    return (layout.documents or layout.corpus.documents) if known else None
