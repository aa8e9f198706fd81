"""`Documents`, the places of all documents of a corpus, and `Document`, the content of one."""

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

SOURCE_BYTES = 16
"""Bytes of a document's entry in `Corpus.sources_file`: two int64, the index of an input and the number of its line or row."""


class Document(NamedTuple):
    """One document.

    Attributes:
      tokens: uint32 [n].
      loss: bool [n], or float32 [n] (weights). Value i applies where token i is the target.
      source: (index of an input in `Corpus.source_names`, line or row of that input, from 1); None if unknown.
    """

    tokens: UInt32[np.ndarray, " n"]
    loss: Shaped[np.ndarray, " n"]
    source: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """Start and length of every document, in the order of the entries of the boundary files, or of the EOS tokens.

    Entries may be in any order, so `start` need not ascend. `start, length = documents` unpacks both.

    Attributes:
      start: int64 [documents], token offset of each document from the start of the first shard.
      length: int64 [documents], number of tokens of each document.
      highest_token: Highest token id of the corpus. It is known only if a search for EOS tokens, which reads all tokens, found
        the documents; else None.
      content: Hash of the bytes that decide where documents begin and end: the boundary files, or every token. "" for the
        documents of a mixture.
      shard_ends: int64 [shards]. Entry i is the number of documents that begin in shards 0 to i. None if EOS tokens end the
        documents.
    """

    start: Int64[np.ndarray, " documents"]
    length: Int64[np.ndarray, " documents"]
    highest_token: int | None = None
    content: str = ""
    shard_ends: Int64[np.ndarray, " shards"] | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.start, self.length))

    def by_start(self) -> Ints:
        """Return the numbers of the documents that have tokens, sorted by `start`."""
        not_empty = np.flatnonzero(self.length > 0)
        return not_empty[np.argsort(self.start[not_empty], kind="stable")]


def read_sources(file: FileStamp, num_documents: int) -> Ints:
    """Return `Corpus.sources`, int64 [documents, 2], read from `file`."""
    data = read_whole(file)
    if len(data) != SOURCE_BYTES * num_documents:
        expected = f"{SOURCE_BYTES * num_documents}, {SOURCE_BYTES} for each of {num_documents} documents"
        raise CorpusError(f"{file.path}: {len(data)} bytes; expected {expected}. Copy it again, from the same corpus.")
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)
