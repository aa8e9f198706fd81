"""RunDocuments: one numbering of the documents of all stages of a run."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from grain_sft.corpus import Documents
from grain_sft.layout.layout import Layout
from grain_sft.types import Bools, Ints


@dataclasses.dataclass(frozen=True, eq=False)
class _NumberedPart:
    """Part of a layout whose documents no earlier layout of the run has. Parts are the sources of a mixture, or the layout."""

    layout: Layout
    name: str
    part: Layout
    first: int  # number of the part's first document in the run; unused in the first layout (see `RunDocuments._first`)


class RunDocuments:
    """Numbers of the documents of a run, as a trace prints them.

    The documents of the first stage keep the numbers of its layout, such as 0 to 99. In the second stage, the first document
    that is new gets number 100. So a stage that is added at the end of a run does not change the numbers of earlier stages.

    If a layout has a False `follows_documents`, it may have to read all tokens to count its documents. So it reserves as many
    numbers as its corpus has tokens, or more if boundary files list more documents.

    Args:
      layouts: Layout of each stage, in order. Stages may share a layout.
    """

    def __init__(self, layouts: Sequence[Layout]) -> None:
        self.layouts = tuple({id(layout): layout for layout in layouts}.values())
        self._numbered: list[list[_NumberedPart]] = []  # by layout and by part
        for layout in self.layouts:
            self._numbered.append(self._number_parts(layout))

    def _number_parts(self, layout: Layout) -> list[_NumberedPart]:
        """Return an entry for each part of `layout`: an earlier entry with the same documents, or else a new entry."""
        earlier = dict.fromkeys(entry for entries in self._numbered for entry in entries)
        end = sum(_num_numbers(entry.part) for entry in earlier)
        numbered: list[_NumberedPart] = []
        for name, part in parts_by_documents(layout):
            if same := [entry for entry in earlier if _same_documents(entry.part, part)]:
                # Several entries have the same documents if a mixture has a corpus twice. Prefer the entry with this part's
                # name. If there is none, prefer an entry that no other part of `layout` gets.
                entry = min(same, key=lambda each: (each.name != name, each.name in layout.parts or each in numbered))
            else:
                entry = _NumberedPart(layout, name, part, end)
                end += _num_numbers(part) if earlier else 0  # the first layout uses no `first`
            numbered.append(entry)
        return numbered

    @property
    def parts(self) -> Iterator[tuple[str, Layout, Layout]]:
        """(name, part, layout) of each part whose documents no earlier layout has. `name` is as in `Layout.parts`."""
        for layout, numbered in zip(self.layouts, self._numbered, strict=True):
            yield from ((entry.name, entry.part, layout) for entry in numbered if entry.layout is layout)

    def of(self, layout: Layout, documents: Ints) -> Ints:
        """Map `documents`, numbers in `layout`, to numbers in the run, int64 [n]. -1 (no document) stays -1."""
        if layout is self.layouts[0]:
            return documents
        numbers = np.full_like(documents, -1)
        split = split_documents(layout, documents)  # may stop before the last part, so `zip` below is not strict
        for (_, _, mask, own), entry in zip(split, self._numbered[self.layouts.index(layout)], strict=False):
            numbers[mask] = own + self._first(entry)
        return numbers

    def within(self, layout: Layout, documents: Ints) -> Ints:
        """Map `documents`, numbers in the run, to numbers in `layout`, int64 [n], ascending. Drop documents not in `layout`.

        If `layout` is the first, numbers past its last document may remain. Dropping them could read all tokens.
        """
        if len(self.layouts) == 1:
            return documents
        if layout is self.layouts[0]:
            return documents[documents < sum(map(_num_numbers, layout.parts.values()))]
        numbers = [documents[:0]]
        numbered = self._numbered[self.layouts.index(layout)]
        for (name, part), entry in zip(parts_by_documents(layout), numbered, strict=True):
            own = documents - self._first(entry)
            own = own[(own >= 0) & (own < _num_numbers(part))]
            if len(own):  # only then: `num_documents` may read all tokens
                numbers.append(own[own < part.num_documents] + layout.first_document(name))
        return np.unique(np.concatenate(numbers))

    def _first(self, entry: _NumberedPart) -> int:
        """Return the number that a part's first document has in the run."""
        if entry.layout is self.layouts[0]:
            return entry.layout.first_document(entry.name)
        return entry.first


def _num_numbers(part: Layout) -> int:
    """Return how many numbers a part reserves."""
    if part.follows_documents:
        return part.num_documents
    # boundary files may list empty documents, so the documents may outnumber the tokens
    return max(part.corpus.num_tokens, part.num_documents if part.corpus.has_boundary_files else 0)


def _same_documents(one: Layout, other: Layout) -> bool:
    """Return whether two layouts have the same documents of the same files.

    If neither follows documents, no tokens are read: equal ranges of files, EOS ids and `has_boundary_files` are enough.
    """
    corpus, other_corpus = one.corpus, other.corpus
    if corpus.ranges != other_corpus.ranges:
        return False
    if not (one.follows_documents or other.follows_documents):
        same_eos = corpus.eos_token_id == other_corpus.eos_token_id
        return same_eos and corpus.has_boundary_files == other_corpus.has_boundary_files
    documents, other_documents = _documents(one), _documents(other)
    if documents is None or other_documents is None:
        return False
    return documents is other_documents or all(map(np.array_equal, documents, other_documents))


def _documents(layout: Layout) -> Documents | None:
    """Return the documents of a layout or its corpus; None for a corpus with neither boundary files nor an EOS id."""
    has_ends = layout.follows_documents or layout.corpus.has_boundary_files or layout.corpus.eos_token_id is not None
    return (layout.documents or layout.corpus.documents) if has_ends else None


def parts_by_documents(layout: Layout) -> list[tuple[str, Layout]]:
    """Return the parts of a layout in the order of their document numbers. Parts that follow documents come first."""
    return sorted(layout.parts.items(), key=lambda item: not item[1].follows_documents)


def split_documents(layout: Layout, documents: Ints) -> Iterator[tuple[str, Layout, Bools, Ints]]:
    """Yield (name, part, mask, numbers) for each part of a layout, ordered as in `parts_by_documents`.

    `documents`, int64 [n], are numbers in `layout`. `mask`, bool [n], is True for the documents of the part. `numbers` are the
    numbers of these documents in the part. The iterator stops after the part with the highest of `documents`, because a count
    of the documents of later parts may read all their tokens.
    """
    end, last = 0, int(documents.max(initial=-1))
    for name, part in parts_by_documents(layout):
        if last < end:
            return
        first, end = end, end + part.num_documents
        in_part = (documents >= first) & (documents < end)
        yield name, part, in_part, documents[in_part] - first
