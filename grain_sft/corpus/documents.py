"""Documents: where each document of a corpus begins, by its boundary files or its EOS tokens, and the hash of both."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content
from grain_sft.corpus.boundaries import CUTTING_KINDS
from grain_sft.corpus.eos_scan import ARRAYS, scan
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, artifact, hashing, read_whole

if TYPE_CHECKING:
    from jaxtyping import Int64, Shaped, UInt32

    from grain_sft.corpus.corpus import Corpus
    from grain_sft.corpus.shard import Shard

Ints = npt.NDArray[np.int64]

_KEPT_FROM = 1 << 23  # bytes of tokens from which a scan is cached; a smaller one takes a millisecond


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
      bos_token_id: Token that must follow each EOS that ends a document; implies "eos".
    """

    def __init__(self, corpus: Corpus, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self.corpus, self._bos = corpus, bos_token_id
        self._by_files = corpus.has_boundary_files and boundaries == "auto" and bos_token_id is None

    @functools.cached_property
    def content(self) -> str:
        """`Documents.content`, from the hashes of files where this machine has cached them."""
        corpus = self.corpus
        if "_found" in vars(self):
            return self._found.content
        if self._by_files:
            listed = [shard.boundaries for shard in corpus.shards if shard.boundaries is not None]
            hashes = content.recall(listed) if len(listed) == len(corpus.shards) else None
            return self._found.content if hashes is None else content.content_of_boundaries(corpus, hashes)
        hashes = self._recalled_tokens() if corpus.eos_token_id is not None else None
        return self._found.content if hashes is None else content.content_of_tokens(corpus, hashes, self._bos)

    @functools.cached_property
    def tokens(self) -> str | None:
        """`Documents.tokens`: the hash of every token; None for a corpus with boundary files."""
        if self.corpus.has_boundary_files:
            return None
        hashes = None if "_found" in vars(self) else self._recalled_tokens()
        return self._found.tokens if hashes is None else content.hash_of_tokens(self.corpus, hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents.

        Raises:
          CorpusFileError: A file is missing, not the one that was indexed, or changed since `content` was computed.
          CorpusError: A boundary file is damaged or does not fit, or there are neither boundary files nor `eos_token_id`.
        """
        if self._found.content != self.content:
            raise _written_to(self.corpus)
        return self._found

    @functools.cached_property
    def _found(self) -> Documents:
        return _by_files(self.corpus) if self._by_files else by_eos(self.corpus, self._bos)

    def _recalled_tokens(self) -> list[str] | None:
        return content.recall(self.corpus.shards, of=content.hashed_of(self.corpus))


def _written_to(corpus: Corpus) -> CorpusFileError:
    path = corpus.shards[0].path
    return CorpusFileError(f"{path}, or another file of its corpus, is being written to. Wait until it is complete.")


def sequences_of(corpus: Corpus) -> Documents:
    """Return the sequences of a corpus whose boundary files group them to documents."""
    return _joined(corpus, *_read_parts(corpus, by_sequence=True))


def part_by_part(corpus: Corpus) -> Documents:
    """Return the documents of the boundary files, which every shard must have, without joining any across shards."""
    return _joined(corpus, *_read_parts(corpus))


def _by_files(corpus: Corpus) -> Documents:
    read = functools.cache(lambda: _read_parts(corpus))
    files = [shard.boundaries for shard in corpus.shards if shard.boundaries is not None]
    hashes = content.hashes_of(files, lambda: read()[1])  # the next process need not read them for `content`
    parts, now = read()
    if now != hashes:
        raise _written_to(corpus)
    for number, before in reversed(_continued(corpus, parts)):
        parts[before][1][-1] += parts[number][1][0]
        parts[number] = (parts[number][0][1:], parts[number][1][1:])
    return _joined(corpus, parts, hashes)


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

    def read(shard: Shard) -> tuple[Ints, Ints, str]:
        if shard.boundaries is None:
            raise CorpusError(f"{shard.path}: has no document boundaries, but others have.")
        data = read_whole(shard.boundaries)
        return *shard.boundaries.parse(data, shard.num_tokens, by_sequence=by_sequence), hashing.of_bytes(data)

    with concurrent.futures.ThreadPoolExecutor(hashing.THREADS) as pool:  # 1.5 times as fast with two processors
        found = list(pool.map(read, corpus.shards))
    first = 0
    for shard, (start, *_) in zip(corpus.shards, found, strict=True):
        start += first
        first += shard.num_tokens
    return [(start, length) for start, length, _ in found], [code for *_, code in found]


def _continued(corpus: Corpus, parts: list[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
    """Return (shard, previous shard) for each shard whose first document began in the previous shard.

    The parts of format olmo cut through documents. Where two parts touch, their metadata decide; where these state nothing,
    EOS tokens do, unless the file of sources states another number of documents.
    """
    touching = _touching(corpus, parts)
    boundaries = [corpus.shards[number].boundaries for number, _ in touching]
    if all(file is not None and file.continues for file in boundaries):
        return touching
    without_eos = None if corpus.eos_token_id is None else _without_eos(corpus, touching)
    if corpus.sources_file is None:
        if without_eos is None:
            raise CorpusError(
                f"{corpus.shards[touching[0][0]].path}: whether its first document continues one of the part before is "
                "unknown without the token that ends documents. Give eos_token_id."
            )
        return without_eos
    pieces, sources = sum(len(start) for start, _ in parts), corpus.sources_file.size // 16
    for choice in (without_eos, touching, []):
        if choice is not None and pieces - len(choice) == sources:
            return choice
    raise CorpusError(
        f"{corpus.sources_file.path}: lists {sources} documents, but the boundary files hold {pieces} pieces, and "
        f"{len(touching)} of these may continue one of the part before. They don't belong together, or eos_token_id "
        f"({corpus.eos_token_id}) is wrong."
    )


def _touching(corpus: Corpus, parts: list[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
    """Return (shard, previous shard) for each shard that begins with a document after a shard that ends with one."""
    found = []
    not_empty = [number for number, shard in enumerate(corpus.shards) if shard.num_tokens]
    for before, number in itertools.pairwise(not_empty):
        file, (start, length) = corpus.shards[number].boundaries, parts[before]
        if file is None or file.kind not in CUTTING_KINDS or file.continues is False or not len(start):
            continue
        if start[-1] + length[-1] == parts[number][0][0]:
            found.append((number, before))
    return found


def _without_eos(corpus: Corpus, touching: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of `touching` whose metadata state that they are one document, or whose previous shard does not end
    with an EOS."""
    before = np.array([number for _, number in touching], np.int64)
    ends = np.array([corpus.shards[number].num_tokens - 1 for _, number in touching], np.int64)
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    last = reader.values(before, ends).view(corpus.dtype).reshape(-1)
    files = [corpus.shards[number].boundaries for number, _ in touching]
    found = zip(touching, files, last.tolist(), strict=True)
    return [pair for pair, file, token in found if (file and file.continues) or token != corpus.eos_token_id]


def by_eos(corpus: Corpus, bos_token_id: int | None = None) -> Documents:
    """Return the documents, each with the EOS that ends it. Tokens after a shard's last EOS are in no document.

    With `bos_token_id`, an EOS ends a document only before that token or at the end of a shard. The documents of a corpus of
    more than a few MB are cached, in the folder `documents` of the cache.
    """
    if corpus.eos_token_id is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: the ends of documents are unknown without boundary files. Give eos_token_id."
        )
    scan_once = functools.cache(lambda: scan(corpus, bos_token_id))
    if corpus.num_tokens * corpus.dtype.itemsize < _KEPT_FROM:
        arrays: artifact.Arrays
        arrays, hashes = scan_once()
    else:
        hashes = content.hashes_of(corpus.shards, lambda: scan_once()[1], of=content.hashed_of(corpus))

        def make() -> dict[str, Ints]:
            made, now = scan_once()
            if now != hashes:
                raise _written_to(corpus)
            return made

        depends = {"documents": 3, "content": content.content_of_tokens(corpus, hashes, bos_token_id)}
        check = functools.partial(_check_documents, corpus.num_tokens)
        arrays = artifact.load_or_make("documents", depends, make, check=check)
    start, length, highest = (arrays[name].view(np.ndarray) for name in ARRAYS)
    key = content.content_of_tokens(corpus, hashes, bos_token_id)
    return Documents(start, length, int(highest[0]), key, content.hash_of_tokens(corpus, hashes))


def _check_documents(num_tokens: int, arrays: artifact.Arrays) -> None:
    """Raise ValueError for cached arrays that no scan can have returned."""
    start, length, highest = (arrays.get(name, np.empty((0, 0))) for name in ARRAYS)
    if any(array.dtype != np.int64 or array.ndim != 1 for array in (start, length, highest)) or len(highest) != 1:
        raise ValueError("its arrays are not int64 [documents]")
    if start.shape != length.shape or (length < 1).any() or (length > num_tokens).any():
        raise ValueError("its lengths are not those of documents")
    bounds = np.stack([start, start + length], axis=1).reshape(-1)
    if len(bounds) and (bounds[0] < 0 or bounds[-1] > num_tokens or (bounds[1:] < bounds[:-1]).any()):
        raise ValueError("its documents overlap or lie outside the corpus")
