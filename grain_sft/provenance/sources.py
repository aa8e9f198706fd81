"""Where the documents of a trace come from: the inputs of a corpus, the labels of a mix, the sources of a mixture."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus
from grain_sft.errors import CorpusError
from grain_sft.layout import Layout, PackedLayout
from grain_sft.layout.mixture import MixtureLayout
from grain_sft.provenance.documents import FOLLOWING, first_document
from grain_sft.storage.file_stamp import read_whole

Ints = npt.NDArray[np.int64]


class Sources:
    """Where documents come from: of the corpus's file of sources, or by the labels that a mix gives its shards.

    Attributes:
      names: of the sources that are counted; one that nothing names is "".
    """

    def __init__(self, layout: Layout) -> None:
        corpus = layout.corpus
        self._table: Ints | None = source_table(corpus) if isinstance(layout, FOLLOWING) else None
        if self._table is not None and isinstance(layout, PackedLayout) and layout.other_documents is not None:
            self._table = layout.sources
        if self._table is not None:
            count = max(len(corpus.source_names), int(self._table[:, 0].max(initial=-1)) + 1)
            self.names = (*corpus.source_names, *("" for _ in range(count - len(corpus.source_names))))
            return
        labels = [shard.label for shard in corpus.shards]
        self.names = tuple(dict.fromkeys(labels))
        self._labels: Ints = np.array([self.names.index(label) for label in labels], np.int64)

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        """(source, record) of each piece: its number in `names`; and the line or row in it, from 1, -1 where the corpus
        does not say."""
        if self._table is None:
            return self._labels[shards], np.full(len(shards), -1, np.int64)
        if len(documents) and int(documents.max()) >= len(self._table):
            raise CorpusError(
                f"the corpus's file of sources lists {len(self._table)} documents, but there is a document "
                f"{int(documents.max())}. It is of another corpus, or documents were found another way (boundaries)."
            )
        found = self._table[documents]
        return found[:, 0], found[:, 1]


class MixtureSources(Sources):
    """The sources of a mixture's sources: the name of each, and where it has several of its own, theirs behind it."""

    def __init__(self, layout: Layout) -> None:
        assert isinstance(layout, MixtureLayout)
        self._layout = layout
        self._parts = [Sources(part) for part in layout.parts]
        self.names: tuple[str, ...] = ()
        self._first_names = []
        for name, part in zip(layout.names, self._parts, strict=True):
            self._first_names.append(len(self.names))
            several = len(part.names) > 1
            self.names += tuple(
                f"{name}/{each or number}" if several else name for number, each in enumerate(part.names)
            )

    def of(self, shards: Ints, documents: Ints) -> tuple[Ints, Ints]:
        source, record = np.zeros(len(shards), np.int64), np.full(len(shards), -1, np.int64)
        part = self._layout.first_shards.searchsorted(shards, side="right") - 1
        for number in np.unique(part).tolist():
            here, follows = part == number, isinstance(self._layout.parts[number], FOLLOWING)
            own = documents[here] - (first_document(self._layout, number) if follows else 0)
            found, record[here] = self._parts[number].of(shards[here] - self._layout.first_shards[number], own)
            source[here] = found + self._first_names[number]
        return source, record


def sources_of(layout: Layout) -> Sources:
    """The sources of a layout's documents."""
    return MixtureSources(layout) if isinstance(layout, MixtureLayout) else Sources(layout)


def source_table(corpus: Corpus) -> Ints | None:
    """`Corpus.sources`, without looking for the documents."""
    if corpus.sources_file is None:
        return None
    if "sources" in vars(corpus):
        return corpus.sources
    data = read_whole(corpus.sources_file)
    if len(data) % 16:
        raise CorpusError(f"{corpus.sources_file.path}: {len(data)} bytes is no multiple of 16. It was cut short.")
    return np.frombuffer(data, "<i8").astype(np.int64, copy=False).reshape(-1, 2)
