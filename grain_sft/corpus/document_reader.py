"""Reading of documents: their tokens, loss and sources, in blocks of a few MB."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from grain_sft.corpus.documents import Document
from grain_sft.errors import CorpusError

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

_BLOCK_TOKENS = 1 << 20  # per read


def iter_documents(corpus: Corpus) -> Iterator[Document]:
    """Yield every document in order. Its arrays are views of the block that was read."""
    start, length = corpus.documents
    stop = start + length
    breaks = np.append(np.flatnonzero(start[1:] < stop[:-1]) + 1, len(start))  # where a read has to end
    first = 0
    while first < len(start):
        end = int(breaks[np.searchsorted(breaks, first, side="right")])
        last = first + max(1, int(np.searchsorted(stop[first:end], start[first] + _BLOCK_TOKENS, side="right")))
        yield from read_documents(corpus, first, last)
        first = last


def read_documents(corpus: Corpus, first: int, last: int) -> Iterator[Document]:
    """Yield documents `first` to `last - 1`, which must not overlap or go back, from one read."""
    start, length = (each[first:last] for each in corpus.documents)
    begin = int(start[0])
    tokens, loss = corpus.read(begin, int(start[-1] + length[-1]))
    if tokens.dtype.itemsize > 4 and (highest := int(tokens.max(initial=0))) > np.iinfo(np.uint32).max:
        raise CorpusError(f"a token id of {highest}: no vocabulary has it. The corpus was opened with the wrong dtype.")
    tokens = tokens.astype(np.uint32, copy=False)
    loss = np.ones(len(tokens), np.bool_) if loss is None else loss
    sources = [None] * (last - first) if corpus.sources is None else map(tuple, corpus.sources[first:last].tolist())
    for at, size, source in zip((start - begin).tolist(), length.tolist(), sources, strict=True):
        yield Document(tokens[at : at + size], loss[at : at + size], source)
