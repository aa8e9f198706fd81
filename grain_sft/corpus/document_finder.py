"""DocumentFinder: the documents of a corpus by its boundary files or its EOS tokens, and the hash of what decides them."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from grain_sft.corpus import content
from grain_sft.corpus.corpus_files import CorpusFiles
from grain_sft.corpus.documents import Documents, Ints, parse_boundaries
from grain_sft.corpus.eos_scan import by_eos
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, hashing, read_whole


class DocumentFinder:
    """The documents that a layout follows. `content` and `tokens` read nothing that this machine has hashed before.

    Args:
      corpus: Corpus whose documents are found.
      boundaries: "auto" for its boundary files, if it has any; "eos" for its EOS tokens alone.
      bos_token_id: Token that has to follow an EOS for it to end a document; implies "eos".
    """

    def __init__(self, corpus: CorpusFiles, boundaries: str = "auto", bos_token_id: int | None = None) -> None:
        self._corpus, self._bos = corpus, bos_token_id
        self._by_files = corpus.has_boundary_files and boundaries == "auto" and bos_token_id is None

    @functools.cached_property
    def content(self) -> str:
        """`Documents.content`; found without the documents where hashes of their files are cached."""
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
            raise CorpusFileError(
                f"{self._corpus.shards[0].path}, or another file of its corpus, was written to while it was opened. Wait "
                "until the files are complete, then open the corpus again."
            )
        return self._found

    @functools.cached_property
    def _found(self) -> Documents:
        return _by_files(self._corpus) if self._by_files else by_eos(self._corpus, self._bos)

    def _recalled_tokens(self) -> list[str] | None:
        return content.recall(self._corpus.shards, of=content.hashed_of(self._corpus))


def part_by_part(corpus: CorpusFiles) -> Documents:
    """Return the documents of all boundary files, which every shard has, none of them joined with one of the part before.

    Raises: as `DocumentFinder.documents`.
    """
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
    """Return (start, length) of the documents of each boundary file, counted through all shards; and each file's hash."""
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
    """Return (shard, shard before) for the shards whose first document began in the shard before.

    Parts of the format olmo cut through documents. A document continues where one part ends in a document, the next one
    begins with a document, and no EOS is between them. The number of sources decides, where it is stated.
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
    """Return (shard, shard before) for the shards that begin with a document where the shard before ends with one."""
    found = []
    tokens = [number for number, shard in enumerate(corpus.shards) if shard.num_tokens]
    for before, number in itertools.pairwise(tokens):
        file, (start, length) = corpus.shards[number].boundaries, parts[before]
        if file is None or not file.cuts_documents or file.continues is False or not len(start):
            continue
        if start[-1] + length[-1] == parts[number][0][0]:
            found.append((number, before))
    return found


def _without_eos(corpus: CorpusFiles, touching: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return those of `touching` where the shard before does not end with an EOS."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    last = np.empty(1, corpus.dtype)
    found = []
    for number, before in touching:
        reader.gather([before], [corpus.shards[before].num_tokens - 1], [0], [last.nbytes], last.data.cast("B"))
        if int(last[0]) != corpus.eos_token_id:
            found.append((number, before))
    return found
