"""Origins and numbers of documents: the inputs of a corpus, the labels of a mix, the sources of a mixture."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError, RowIndexError
from grain_sft.layout import Layout

Ints = npt.NDArray[np.int64]


class Sources:
    """Sources of the documents of a layout: the inputs in the corpus's file of sources, or the labels that a mix gives its
    shards. A mixture prefixes them with the name of the source, or has that name alone where there is one.

    Attributes:
      names: Names of the sources; "" for one without a name.
    """

    def __init__(self, layout: Layout) -> None:
        self.names: tuple[str, ...] = ()
        self._parts: list[tuple[int, int, int, Ints | None, Ints]] = []
        """First shard, document and name of each part, its table of sources, and the source of each shard."""
        shards = 0
        for name, part in layout.parts.items():
            corpus, table = part.corpus, part.sources
            first = layout.first_document(name) if part.follows_documents else 0
            labels = [shard.label for shard in corpus.shards]
            own: tuple[str, ...] = tuple(dict.fromkeys(labels))
            by_shard = np.array([own.index(label) for label in labels], np.int64)
            if table is not None:
                count = max(len(corpus.source_names), int(table[:, 0].max(initial=-1)) + 1)
                own = (*corpus.source_names, *[""] * (count - len(corpus.source_names)))
            self._parts.append((shards, first, len(self.names), table, by_shard))
            shards += len(labels)
            if name:
                own = tuple(f"{name}/{each or number}" for number, each in enumerate(own)) if len(own) > 1 else (name,)
            self.names += own

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """Return the source of each piece, an index into `names`, and its line there, from 1; -1 without a file of sources."""
        source, record = np.zeros(len(shards), np.int64), np.full(len(shards), -1, np.int64)
        firsts = np.array([first for first, *_ in self._parts])
        part = firsts.searchsorted(shards, side="right") - 1
        for number in np.unique(part).tolist():
            first_shard, first_document, first_name, table, by_shard = self._parts[number]
            here = part == number
            if table is None:
                source[here] = by_shard[shards[here] - first_shard] + first_name
                continue
            own = documents[here] - first_document
            if len(own) and int(own.max()) >= len(table):
                raise CorpusError(
                    f"the corpus's file of sources lists {len(table)} documents, but there is a document "
                    f"{int(own.max())}. It is of another corpus, or documents were found another way (boundaries)."
                )
            source[here], record[here] = table[own, 0] + first_name, table[own, 1]
        return source, record


def number_of_document(layout: Layout, source: str, number: int) -> int:
    """Return the number that document `number` of a mixture's source has in a trace; without a source, `number`.

    Raises:
      RowIndexError: the mixture does not have the source, or the layout is not a mixture.
      CorpusError, CorpusFileError: the documents of a source that does not follow documents can't be found.
    """
    if source in layout.parts:
        return layout.first_document(source) + number
    if not source:
        return number
    named = "none: it is no mixture" if "" in layout.parts else ", ".join(layout.parts)
    raise RowIndexError(f"document {source}:{number}: no such source; there are {named}.")


def layouts_of(layout: Layout) -> list[tuple[int, Layout]]:
    """Return the layouts whose documents a trace numbers, each with its first number."""
    parts = layout.parts.items()
    return [(layout.first_document(name), part) for name, part in parts if part.follows_documents or not name]


def numbers_in(layout: Layout, documents: Ints) -> Ints:
    """Return the numbers, ascending, of those documents of a layout that hold a token of `documents` of its corpus."""
    found, own = layout.documents, layout.corpus.documents
    if found is None or found is own:
        return documents
    start, length = own.start[documents], own.length[documents]
    first = (found.start + found.length).searchsorted(start, side="right")
    count = np.maximum(found.start.searchsorted(start + length, side="left") - first, 0)
    return np.unique(first.repeat(count) + np.arange(int(count.sum())) - (count.cumsum() - count).repeat(count))
