"""DocumentFinder: the documents of a corpus, from its boundary files or EOS tokens, and the hash that identifies them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content
from grain_sft.corpus.corpus_files import CorpusFiles
from grain_sft.corpus.documents import Documents, Ints, parse_boundaries
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, artifact, hashing, read_whole

_SCAN_BYTES = hashing.BLOCK
_ARRAYS = ("start", "length", "highest_token")
_KEPT_FROM = 1 << 23  # bytes of tokens from which a scan is cached; fewer take a millisecond


class DocumentFinder:
    """The documents of a corpus. `content` and `tokens` read no files if this machine has cached their hashes.

    Args:
      corpus: Corpus whose documents are found.
      boundaries: "auto" for its boundary files, if it has any; "eos" for its EOS tokens alone.
      bos_token_id: Token that must follow each EOS that ends a document; implies "eos".
    """

    def __init__(self, corpus: CorpusFiles, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self._corpus, self._bos = corpus, bos_token_id
        self._by_files = corpus.has_boundary_files and boundaries == "auto" and bos_token_id is None

    @functools.cached_property
    def content(self) -> str:
        """`Documents.content`, from the hashes of files where this machine has cached them."""
        corpus = self._corpus
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
        if self._corpus.has_boundary_files:
            return None
        hashes = None if "_found" in vars(self) else self._recalled_tokens()
        return self._found.tokens if hashes is None else content.hash_of_tokens(self._corpus, hashes)

    @functools.cached_property
    def documents(self) -> Documents:
        """The documents.

        Raises:
          CorpusFileError: a file is missing, not the one that was indexed, or changed since `content` was computed.
          CorpusError: a boundary file is damaged or does not fit, or there are neither boundary files nor `eos_token_id`.
        """
        if self._found.content != self.content:
            raise _written_to(self._corpus)
        return self._found

    @functools.cached_property
    def _found(self) -> Documents:
        return _by_files(self._corpus) if self._by_files else by_eos(self._corpus, self._bos)

    def _recalled_tokens(self) -> list[str] | None:
        return content.recall(self._corpus.shards, of=content.hashed_of(self._corpus))


def _written_to(corpus: CorpusFiles) -> CorpusFileError:
    path = corpus.shards[0].path
    return CorpusFileError(f"{path}, or another file of its corpus, is being written to. Wait until it is complete.")


def part_by_part(corpus: CorpusFiles) -> Documents:
    """Return the documents of the boundary files, which every shard must have, without joining any across shards."""
    start, length = map(np.concatenate, zip(*_read_parts(corpus)[0], strict=True))
    return Documents(start, length)


def _by_files(corpus: CorpusFiles) -> Documents:
    parts, hashes = _read_parts(corpus)
    for number, before in reversed(_continued(corpus, parts) if len(parts) > 1 else []):
        parts[before][1][-1] += parts[number][1][0]
        parts[number] = (parts[number][0][1:], parts[number][1][1:])
    start, length = map(np.concatenate, zip(*parts, strict=True))
    return Documents(start, length, content=content.content_of_boundaries(corpus, hashes))


def _read_parts(corpus: CorpusFiles) -> tuple[list[tuple[Ints, Ints]], list[str]]:
    """Return (start, length) of each boundary file's documents, starts counted through all shards; and each file's hash."""
    parts: list[tuple[Ints, Ints]] = []
    hashes = []
    first = 0
    for shard in corpus.shards:
        if shard.boundaries is None:
            raise CorpusError(f"{shard.path}: has no document boundaries, but others have.")
        data = read_whole(shard.boundaries)
        hashes.append(hashing.of_bytes(data))
        start, length = parse_boundaries(shard.boundaries, data, shard.num_tokens)
        parts.append((start + first, length))
        first += shard.num_tokens
    return parts, hashes


def _continued(corpus: CorpusFiles, parts: list[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
    """Return (shard, previous shard) for each shard whose first document began in the previous shard.

    Format olmo may cut a document between two shards. It continues where one shard ends with a document, the next shard
    begins with a document, and no EOS is between them. If a sources file states the number of documents, that decides.
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
        f"{corpus.sources_file.path}: lists {sources} documents, but the boundary files hold {pieces} pieces, of which "
        f"{len(touching)} may continue one of the part before. They don't belong together, or eos_token_id "
        f"({corpus.eos_token_id}) is wrong."
    )


def _touching(corpus: CorpusFiles, parts: list[tuple[Ints, Ints]]) -> list[tuple[int, int]]:
    """Return (shard, previous shard) for each shard that begins with a document after a shard that ends with one."""
    found = []
    not_empty = [number for number, shard in enumerate(corpus.shards) if shard.num_tokens]
    for before, number in itertools.pairwise(not_empty):
        file, (start, length) = corpus.shards[number].boundaries, parts[before]
        if file is None or not file.cuts_documents or file.continues is False or not len(start):
            continue
        if start[-1] + length[-1] == parts[number][0][0]:
            found.append((number, before))
    return found


def _without_eos(corpus: CorpusFiles, touching: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs of `touching` whose previous shard does not end with an EOS."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    last = np.empty(1, corpus.dtype)
    found = []
    for number, before in touching:
        reader.gather([before], [corpus.shards[before].num_tokens - 1], [0], [last.nbytes], last.data.cast("B"))
        if int(last[0]) != corpus.eos_token_id:
            found.append((number, before))
    return found


def count_token(corpus: CorpusFiles, token: int) -> int:
    """Return the number of occurrences of `token`."""
    return sum(int(np.count_nonzero(chunk == token)) for _, _, chunk in _chunks(corpus))


def by_eos(corpus: CorpusFiles, bos_token_id: int | None = None) -> Documents:
    """Return the documents, each with the EOS that ends it. Tokens after a shard's last EOS are in no document.

    With `bos_token_id`, an EOS ends a document only before that token or at the end of a shard. The documents of a corpus of
    more than a few MB are cached, in the folder `documents` of the cache.
    """
    if corpus.eos_token_id is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: where documents end is not known: no boundary files. Give eos_token_id."
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
    start, length, highest = (arrays[name].view(np.ndarray) for name in _ARRAYS)
    key = content.content_of_tokens(corpus, hashes, bos_token_id)
    return Documents(start, length, int(highest[0]), key, content.hash_of_tokens(corpus, hashes))


def _check_documents(num_tokens: int, arrays: artifact.Arrays) -> None:
    """Raise ValueError for cached arrays that no scan can have returned."""
    start, length, highest = (arrays.get(name, np.empty((0, 0))) for name in _ARRAYS)
    if any(array.dtype != np.int64 for array in (start, length, highest)) or highest.shape != (1,):
        raise ValueError("its arrays are not int64 [documents]")
    if start.ndim != 1 or start.shape != length.shape:
        raise ValueError("its arrays are not of one length")
    stop = start + length
    if len(start) and (start.min() < 0 or length.min() < 1 or start.max() >= num_tokens or length.max() > num_tokens):
        raise ValueError("a document lies outside the corpus")
    if (start[1:] < stop[:-1]).any() or (len(stop) and stop[-1] > num_tokens):
        raise ValueError("its documents overlap or lie outside the corpus")


def scan(corpus: CorpusFiles, bos_token_id: int | None) -> tuple[dict[str, Ints], list[str]]:
    """Return the arrays of `Documents`, and the hash of each shard's tokens."""
    starts, ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    current, document_start, after_eos, highest = -1, 0, False, 0
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, first, chunk in _chunks(corpus):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            found = np.flatnonzero(chunk == corpus.eos_token_id)
            if shard != current:
                current, document_start, after_eos = shard, first, False
                shard_end = first + corpus.shards[shard].num_tokens
            if bos_token_id is not None:
                inside = found[found < len(chunk) - 1]
                kept = inside[chunk[inside + 1] == bos_token_id]
                at_end = len(found) > len(inside)
                if after_eos and chunk[0] == bos_token_id:  # the previous chunk ended with an EOS
                    kept = np.append(np.int64(-1), kept)
                if at_end and first + len(chunk) == shard_end:
                    kept = np.append(kept, found[-1])
                found, after_eos = kept, at_end
            if len(found):
                found = found + (first + 1)
                starts.append(np.concatenate([[document_start], found[:-1]]))
                ends.append(found)
                document_start = int(found[-1])
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    start = np.concatenate(starts)
    values = start, np.concatenate(ends) - start, np.array([min(highest, np.iinfo(np.int64).max)], np.int64)
    return dict(zip(_ARRAYS, values, strict=True)), hashes


def _chunks(corpus: CorpusFiles) -> Iterator[tuple[int, int, npt.NDArray[np.unsignedinteger]]]:
    """Yield (shard, token offset in the corpus, tokens) of each chunk of the corpus, each in memory of its own."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    before = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            chunk: npt.NDArray[np.unsignedinteger] = np.empty(min(per_chunk, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [chunk.nbytes], memoryview(chunk.data).cast("B"))
            yield number, before + start, chunk
        before += shard.num_tokens
