"""RunDocuments: numbers of the documents of a run, through all its stages."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Documents
from grain_sft.layout.layout import Layout
from grain_sft.layout.pieces import Ints


@dataclasses.dataclass(frozen=True, eq=False)
class _NumberedPart:
    """One part of a layout, and the number of its first document in the run."""

    layout: Layout
    name: str
    part: Layout
    first: int


class RunDocuments:
    """Numbers of the documents of a run, as a trace prints them.

    The documents of the first stage have the numbers of its layout. After them come, stage by stage, the documents that no
    earlier stage reads. So a stage that is added to a run changes no number. A layout that does not follow documents takes as
    many numbers as its corpus has tokens, because counting its documents could require scanning them.

    Args:
      layouts: Layout of each stage, in order. Stages may share one.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple({id(each): each for each in layouts}.values())
        # per layout: one entry per part, reused from earlier layouts with the same documents
        self._numbered: list[list[_NumberedPart]] = []
        distinct: list[_NumberedPart] = []
        end = 0
        for layout in self.layouts if len(self.layouts) > 1 else ():
            earlier = tuple(distinct)
            numbered: list[_NumberedPart] = []
            for name, part in parts_by_documents(layout):
                candidates = [each for each in earlier if _same_documents(each.part, part)]
                if candidates:  # several if a mixture has a corpus twice: prefer the same name, else an unused entry
                    reserved = {id(each) for each in candidates if each.name in layout.parts}
                    used = reserved.union(map(id, numbered))
                    entry = min(candidates, key=lambda each: (each.name != name, id(each) in used))
                else:
                    entry = _NumberedPart(layout, name, part, end)
                    distinct.append(entry)
                    end += _num_numbers(part)
                numbered.append(entry)
            self._numbered.append(numbered)
        self._end_of_first = next((each.first for each in distinct if each.layout is not self.layouts[0]), end)

    @property
    def parts(self) -> Iterator[tuple[str, Layout, Layout]]:
        """(name in a mixture, part, layout of its stage) of each distinct part. Parts repeat documents only within one
        stage."""
        if len(self.layouts) == 1:
            yield from ((name, part, self.layouts[0]) for name, part in self.layouts[0].parts.items())
        for layout, numbered in zip(self.layouts, self._numbered, strict=False):  # no entries for a single layout
            yield from ((each.name, each.part, layout) for each in numbered if each.layout is layout)

    def of(self, layout: Layout, documents: Ints) -> Ints:
        """Map `documents`, numbers in `layout`, to numbers in the run, int64 [n]; -1 stays."""
        if layout is self.layouts[0]:
            return documents
        found = np.full_like(documents, -1)
        split = split_documents(layout, documents)  # ends after the part of the highest document
        for (_, _, mask, own), entry in zip(split, self._numbered[self.layouts.index(layout)], strict=False):
            found[mask] = own + self._first(entry)
        return found

    def within(self, layout: Layout, documents: Ints) -> Ints:
        """Map `documents`, numbers in the run, to numbers in `layout`, int64 [n], ascending. Drop those that it lacks."""
        if len(self.layouts) == 1:
            return documents
        if layout is self.layouts[0]:
            return documents[documents < self._end_of_first]
        found = [documents[:0]]
        numbered = self._numbered[self.layouts.index(layout)]
        for (name, part), entry in zip(parts_by_documents(layout), numbered, strict=True):
            own = documents - self._first(entry)
            own = own[(own >= 0) & (own < _num_numbers(part))]
            if len(own):  # otherwise the ends of documents, which may be unknown, are not asked for
                found.append(own[own < part.num_documents] + layout.first_document(name))
        return np.unique(np.concatenate(found))

    def _first(self, entry: _NumberedPart) -> int:
        return entry.first if entry.layout is not self.layouts[0] else entry.layout.first_document(entry.name)


def _num_numbers(part: Layout) -> int:
    """Return how many numbers the documents of a part take."""
    return part.num_documents if part.follows_documents else part.corpus.num_tokens


def _same_documents(one: Layout, other: Layout) -> bool:
    """Return whether layouts have the same documents of the same files. Reads tokens only if one follows documents."""
    corpus, other_corpus = one.corpus, other.corpus
    if [shard.path for shard in corpus.shards] != [shard.path for shard in other_corpus.shards]:
        return False
    if not (one.follows_documents or other.follows_documents):
        ends, other_ends = ((each.eos_token_id, each.has_boundary_files) for each in (corpus, other_corpus))
        return ends == other_ends
    documents, other_documents = _documents(one), _documents(other)
    if documents is None or other_documents is None:
        return False
    return documents is other_documents or all(map(np.array_equal, documents, other_documents))


def _documents(layout: Layout) -> Documents | None:
    """Return the documents of a layout's rows, or of its corpus; None if neither boundary files nor EOS define their ends."""
    has_ends = layout.follows_documents or layout.corpus.has_boundary_files or layout.corpus.eos_token_id is not None
    return (layout.documents or layout.corpus.documents) if has_ends else None


def parts_by_documents(layout: Layout) -> list[tuple[str, Layout]]:
    """Return the parts of a layout in the order in which it numbers their documents: first those that follow documents."""
    return sorted(layout.parts.items(), key=lambda item: not item[1].follows_documents)


def split_documents(layout: Layout, documents: Ints) -> Iterator[tuple[str, Layout, npt.NDArray[np.bool_], Ints]]:
    """Yield for each part of a layout: its name, the part, a mask of those `documents` (int64 [n]) that it has, and their
    numbers in the part. Parts are ordered as in `parts_by_documents`. Those after the highest of `documents` are left out,
    because counting their documents may read all of their tokens."""
    end, last = 0, int(documents.max(initial=-1))
    for name, part in parts_by_documents(layout):
        if last < end:
            return
        first, end = end, end + part.num_documents
        here = (documents >= first) & (documents < end)
        yield name, part, here, documents[here] - first
