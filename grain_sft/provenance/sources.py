"""Where the documents of a trace come from: the inputs of a corpus, the labels of a mix, the sources of a mixture."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.errors import CorpusError
from grain_sft.layout import Layout

Ints = npt.NDArray[np.int64]


class Sources:
    """Sources of the documents of a layout: the inputs in the corpus's file of sources, or the labels that a mix gives its
    shards. In a mixture the name of each source and, where it has several of its own, theirs behind it.

    Attributes:
      names: Names of the sources; "" for one without a name.
    """

    def __init__(self, layout: Layout) -> None:
        self.names: tuple[str, ...] = ()
        self._parts: list[_PartSources] = []
        self._offsets: list[tuple[int, int, int]] = []  # first shard, document and name of each part
        shards = 0
        for name, part in layout.parts.items():
            found = _PartSources(part)
            self._parts.append(found)
            document = layout.first_document(name) if part.follows_documents else 0
            self._offsets.append((shards, document, len(self.names)))
            shards += len(part.corpus.shards)
            if not name:
                self.names += found.names
            elif len(found.names) > 1:
                self.names += tuple(f"{name}/{each or number}" for number, each in enumerate(found.names))
            else:
                self.names += (name,) * len(found.names)

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """Return the source of each piece, its number in `names`, and its line or row there, from 1; -1 where the corpus does
        not have it."""
        source, record = np.zeros(len(shards), np.int64), np.full(len(shards), -1, np.int64)
        part = np.array([first for first, _, _ in self._offsets]).searchsorted(shards, side="right") - 1
        for number in np.unique(part).tolist():
            here, (shard, document, name) = part == number, self._offsets[number]
            found, record[here] = self._parts[number].of(shards[here] - shard, documents[here] - document)
            source[here] = found + name
        return source, record


class _PartSources:
    """Sources of a layout that is not a mixture."""

    def __init__(self, layout: Layout) -> None:
        corpus = layout.corpus
        self._table = layout.sources
        if self._table is not None:
            count = max(len(corpus.source_names), int(self._table[:, 0].max(initial=-1)) + 1)
            self.names = (*corpus.source_names, *("" for _ in range(count - len(corpus.source_names))))
            return
        labels = [shard.label for shard in corpus.shards]
        self.names = tuple(dict.fromkeys(labels))
        self._labels: Ints = np.array([self.names.index(label) for label in labels], np.int64)

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        if self._table is None:
            return self._labels[shards], np.full(len(shards), -1, np.int64)
        if len(documents) and int(documents.max()) >= len(self._table):
            raise CorpusError(
                f"the corpus's file of sources lists {len(self._table)} documents, but there is a document "
                f"{int(documents.max())}. It is of another corpus, or documents were found another way (boundaries)."
            )
        found = self._table[documents]
        return found[:, 0], found[:, 1]
