"""Documents: their first tokens and lengths, their sources, and iteration over their tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.errors import CorpusError
from grain_sft.storage import FileStamp, read_whole
from grain_sft.types import Ints

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped, UInt32

    from grain_sft.corpus.corpus import Corpus

SOURCE_BYTES = 16
"""Bytes of each document in a file of sources: two int64."""

_BLOCK_TOKENS = 1 << 20  # tokens that `iter_documents` reads at once


class Document(NamedTuple):
    """One document.

    Attributes:
      tokens: uint32 [n].
      loss: bool [n], or float32 [n] (weights). Value i applies where token i is the target.
      source: Index of the input in `Corpus.source_names`, and line or row of that input, from 1; None if unknown.
    """

    tokens: UInt32[np.ndarray, " n"]
    loss: Shaped[np.ndarray, " n"]
    source: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """First token and length of every document, in order; unpacks as `start, length = documents`.

    Attributes:
      start: int64 [documents], token offset of each document, counted through all shards.
      length: int64 [documents], number of tokens of each document.
      highest_token: Highest token id of the corpus; None for documents of boundary files.
      content: Hash of the bytes that decide where documents begin and end: the boundary files, or every token.
      tokens: Hash of every token; None for documents of boundary files.
      shard_ends: int64 [shards], number of documents that begin in a shard or in those before it; None for documents that
        EOS tokens end.
    """

    start: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]
    highest_token: int | None = None
    content: str = ""
    tokens: str | None = None
    shard_ends: Int64[np.ndarray, " shards"] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.start, self.length))

    def by_start(self) -> Ints:
        """Return the numbers of the documents that have tokens, sorted by first token. Some formats list them in any order."""
        not_empty = np.flatnonzero(self.length > 0)
        return not_empty[np.argsort(self.start[not_empty], kind="stable")]


def read_sources(file: FileStamp, num_documents: int) -> Ints:
    """Return the content of a file of sources, int64 [documents, 2], as `Corpus.sources`."""
    data = read_whole(file)
    expected = SOURCE_BYTES * num_documents
    if len(data) != expected:
        raise CorpusError(
            f"{file.path}: {len(data)} bytes; expected {expected}, {SOURCE_BYTES} for each of {num_documents} documents. It is "
            "damaged, or of another corpus."
        )
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)


def iter_documents(corpus: Corpus) -> Iterator[Document]:
    """Yield every document in order. Its arrays are views of the block that was read.

    A block is consecutive documents of about `_BLOCK_TOKENS` tokens. It ends before a document that begins within or before the
    previous one, as the documents of some formats do.
    """
    start, length = corpus.documents
    stop = start + length
    goes_back = np.flatnonzero(start[1:] < stop[:-1]) + 1
    run_ends = np.append(goes_back, len(start))
    first = 0
    while first < len(start):
        run_end = int(run_ends[np.searchsorted(run_ends, first, side="right")])
        fitting = int(np.searchsorted(stop[first:run_end], start[first] + _BLOCK_TOKENS, side="right"))
        last = first + max(1, fitting)
        yield from read_documents(corpus, first, last)
        first = last


def read_documents(corpus: Corpus, first: int, last: int) -> Iterator[Document]:
    """Yield documents `first` to `last - 1`, read at once. Each must begin at or after the end of the one before."""
    starts, lengths = (column[first:last] for column in corpus.documents)
    block_start = int(starts[0])
    tokens, loss = corpus.read(block_start, int(starts[-1] + lengths[-1]))
    if tokens.dtype.itemsize > 4 and (highest := int(tokens.max(initial=0))) > np.iinfo(np.uint32).max:
        raise CorpusError(f"a token id of {highest}: no vocabulary has it. The corpus was opened with the wrong dtype.")
    tokens = tokens.astype(np.uint32, copy=False)
    if loss is None:
        loss = np.ones(len(tokens), np.bool_)
    sources = [None] * (last - first) if corpus.sources is None else map(tuple, corpus.sources[first:last].tolist())
    for begin, length, source in zip((starts - block_start).tolist(), lengths.tolist(), sources, strict=True):
        yield Document(tokens[begin : begin + length], loss[begin : begin + length], source)
