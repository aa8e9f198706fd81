"""Documents: where each document of a corpus begins, by its boundary files or its EOS tokens, and how it is read."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.boundaries import CUTTING_KINDS, BoundaryFile, Ints
from grain_sft.corpus.eos_scan import scan
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, artifact, hashing, read_whole

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped, UInt32

    from grain_sft.corpus.corpus import Corpus
    from grain_sft.corpus.shard import Shard

_KEPT_FROM = 1 << 23  # bytes of tokens from which a scan is cached; a smaller one takes a millisecond
_BLOCK_TOKENS = 1 << 20  # read at once


class Document(NamedTuple):
    """One document.

    Attributes:
      tokens: uint32 [n].
      loss: bool [n], or float32 [n] (weights). Value i applies where token i is the target.
      source: (number of the input, line or row in it from 1); None: unknown.
    """

    tokens: UInt32[np.ndarray, " n"]
    loss: Shaped[np.ndarray, " n"]
    source: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """First token and length of every document, in order; unpacks as `start, length = documents`.

    Attributes:
      start: int64 [documents], token offsets, counted through all shards.
      length: int64 [documents], numbers of tokens.
      highest_token: Highest token id, if finding the documents read every token; else None.
      content: Hash of all bytes that decide where these documents are: of the boundary files, or of every token.
      tokens: Hash of every token, if finding the documents read all of them; else None.
      shard_ends: int64 [shards], number of documents up to and with each shard, by boundary files; None where each EOS ends
        a document, so that none is empty.
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
        """Return the numbers of the documents with tokens, by their first token: some formats list them in any order."""
        some = np.flatnonzero(self.length > 0)
        return some[np.argsort(self.start[some], kind="stable")]


class DocumentFinder:
    """The documents of a corpus. `content` and `tokens` read no files if this machine has cached their hashes.

    Args:
      corpus: Corpus whose documents are found.
      boundaries: "auto" for its boundary files if it has any, else its EOS tokens; "eos" for its EOS tokens.
      bos_token_id: Token that must follow each EOS that ends a document, except at the end of a shard; implies "eos".
    """

    def __init__(self, corpus: Corpus, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self.corpus, self._bos = corpus, bos_token_id
        self._by_files = corpus.has_boundary_files and boundaries == "auto" and bos_token_id is None
        self._found: tuple[Documents, list[str]] | None = None  # what `_hashes` had to read, for `documents`

    @functools.cached_property
    def _hashes(self) -> list[str]:
        """Hashes of the boundary files, or of each shard's tokens, from the cache if it has them."""

        def read() -> list[str]:
            self._found = self._read()
            return self._found[1]

        corpus = self.corpus
        if self._by_files:
            return content.hashes_of(_boundary_files(corpus), read)
        if corpus.eos_token_id is None:
            raise CorpusError(
                f"{corpus.shards[0].path}: the ends of documents are unknown without boundary files. Give eos_token_id."
            )
        return content.hashes_of(corpus.shards, read, of=content.hashed_of(corpus))

    def _read(self) -> tuple[Documents, list[str]]:
        """Find the documents. Return them and the hashes of what was read."""
        if self._by_files:
            parts, hashes = _read_parts(self.corpus)
            for number, before in reversed(_continued(self.corpus, parts)):
                parts[before][1][-1] += parts[number][1][0]
                parts[number] = (parts[number][0][1:], parts[number][1][1:])
            return _joined(self.corpus, parts, hashes), hashes
        start, length, highest, hashes = scan(self.corpus, self._bos)
        key = content.content_of_tokens(self.corpus, hashes, self._bos)
        return Documents(start, length, highest, key, content.hash_of_tokens(self.corpus, hashes)), hashes

    @functools.cached_property
    def content(self) -> str:
        """`Documents.content`."""
        if self._by_files:
            return content.content_of_boundaries(self.corpus, self._hashes)
        return content.content_of_tokens(self.corpus, self._hashes, self._bos)

    @functools.cached_property
    def tokens(self) -> str | None:
        """`Documents.tokens`: the hash of every token; None for a corpus with boundary files."""
        return None if self.corpus.has_boundary_files else content.hash_of_tokens(self.corpus, self._hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents. Those that EOS tokens end in more than a few MB are cached, in the folder `documents` of the cache.

        Raises:
          CorpusFileError: A file is missing, not the one that was indexed, or changed since `content` was computed.
          CorpusError: A boundary file is damaged or does not fit, or there are neither boundary files nor `eos_token_id`.
        """
        key = self.content

        def find() -> Documents:
            documents, _ = self._found or self._read()
            self._found = None
            if documents.content != key:
                path = self.corpus.shards[0].path
                raise CorpusFileError(
                    f"{path}, or another file of its corpus, is being written to. Wait until it is complete."
                )
            return documents

        def make() -> dict[str, Ints]:
            found = find()
            return {"start": found.start, "length": found.length, "highest_token": np.array([found.highest_token])}

        if self._by_files or self.corpus.num_tokens * self.corpus.dtype.itemsize < _KEPT_FROM:
            return find()
        made = artifact.load_or_make("documents", {"documents": 3, "content": key}, make)
        start, length, highest = (made[name].view(np.ndarray) for name in ("start", "length", "highest_token"))
        return Documents(start, length, int(highest[0]), key, content.hash_of_tokens(self.corpus, self._hashes))


def sequences_of(corpus: Corpus) -> Documents:
    """Return the sequences of a corpus whose boundary files group them to documents."""
    return _joined(corpus, *_read_parts(corpus, by_sequence=True))


def part_by_part(corpus: Corpus) -> Documents:
    """Return the documents of the boundary files, which every shard must have, without joining any across shards."""
    return _joined(corpus, *_read_parts(corpus))


def _joined(corpus: Corpus, parts: list[tuple[Ints, Ints]], hashes: list[str]) -> Documents:
    """Return the documents of all parts. `parts` is emptied as they are copied, which halves the memory at most."""
    ends = np.cumsum([len(each) for each, _ in parts], dtype=np.int64)
    start, length = np.empty((2, ends[-1]), np.int64)
    while parts:
        stop, (start_in_part, length_in_part) = ends[len(parts) - 1], parts.pop()
        here = slice(stop - len(start_in_part), stop)
        start[here], length[here] = start_in_part, length_in_part
    return Documents(start, length, content=content.content_of_boundaries(corpus, hashes), shard_ends=ends)


def _read_parts(corpus: Corpus, *, by_sequence: bool = False) -> tuple[list[tuple[Ints, Ints]], list[str]]:
    """Return (start, length) of each boundary file's documents, starts counted through all shards; and each file's hash."""

    def read(shard: Shard, file: BoundaryFile) -> tuple[Ints, Ints, str]:
        data = read_whole(file)
        return *file.parse(data, shard.num_tokens, by_sequence=by_sequence), hashing.of_bytes(data)

    with concurrent.futures.ThreadPoolExecutor(hashing.THREADS) as pool:  # 1.5 times as fast with two processors
        found = list(pool.map(read, corpus.shards, _boundary_files(corpus)))
    first = 0
    for shard, (start, *_) in zip(corpus.shards, found, strict=True):
        start += first
        first += shard.num_tokens
    return [(start, length) for start, length, _ in found], [code for *_, code in found]


def _boundary_files(corpus: Corpus) -> list[BoundaryFile]:
    """Return the boundary file of each shard. A shard without one is a CorpusError."""
    found = []
    for shard in corpus.shards:
        if shard.boundaries is None:
            raise CorpusError(f"{shard.path}: has no document boundaries, but others have.")
        found.append(shard.boundaries)
    return found


def _continued(corpus: Corpus, parts: list[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
    """Return (shard, previous shard) for each shard whose first document began in the previous shard.

    The parts of format olmo cut through documents. Where two parts touch, their metadata decide; where these state nothing,
    EOS tokens do, unless the file of sources states another number of documents.
    """
    files = _boundary_files(corpus)
    touching = []
    for before, number in itertools.pairwise(number for number, (start, _) in enumerate(parts) if len(start)):
        start, length = parts[before]
        may_continue = files[number].kind in CUTTING_KINDS and files[number].continues is not False
        if may_continue and start[-1] + length[-1] == parts[number][0][0]:
            touching.append((number, before))
    if all(files[number].continues for number, _ in touching):
        return touching
    choices = [touching, []]
    if corpus.eos_token_id is not None:
        last = _last_tokens(corpus, [before for _, before in touching])
        pairs = zip(touching, last, strict=True)
        choices.insert(0, [pair for pair, token in pairs if files[pair[0]].continues or token != corpus.eos_token_id])
    if corpus.sources_file is None:
        if corpus.eos_token_id is None:
            raise CorpusError(
                f"{corpus.shards[touching[0][0]].path}: whether its first document continues one of the part before is "
                "unknown without the token that ends documents. Give eos_token_id."
            )
        return choices[0]
    pieces, sources = sum(len(start) for start, _ in parts), corpus.sources_file.size // 16
    for choice in choices:
        if pieces - len(choice) == sources:
            return choice
    raise CorpusError(
        f"{corpus.sources_file.path}: lists {sources} documents, but the boundary files hold {pieces} pieces, and "
        f"{len(touching)} of these may continue one of the part before. They don't belong together, or eos_token_id "
        f"({corpus.eos_token_id}) is wrong."
    )


def _last_tokens(corpus: Corpus, shards: list[int]) -> list[int]:
    """Return the last token of each of these shards."""
    ends = np.array([corpus.shards[number].num_tokens - 1 for number in shards], np.int64)
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    return reader.values(np.array(shards, np.int64), ends).view(corpus.dtype).reshape(-1).tolist()


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
