"""DocumentFinder: the documents of a corpus by its boundary files or its EOS tokens, and the hash of what decides them."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

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
    return Documents(*_concatenated(_read_parts(corpus)[0]))


def _by_files(corpus: CorpusFiles) -> Documents:
    without = next((shard.path for shard in corpus.shards if shard.boundaries is None), None)
    if without is not None:
        raise CorpusError(f"{without}: has no document boundaries, but others have.")
    parts, hashes = _read_parts(corpus)
    for number in _continued(corpus, parts) if len(parts) > 1 else []:
        before = number - 1
        while not len(parts[before][0]):
            before -= 1
        parts[before][1][-1] += parts[number][1][0]
        parts[number] = (parts[number][0][1:], parts[number][1][1:])
    return Documents(*_concatenated(parts), content=content.content_of_boundaries(corpus, hashes))


def _read_parts(corpus: CorpusFiles) -> tuple[list[tuple[Ints, Ints]], list[str]]:
    """Return (start, length) of the documents of each boundary file, counted through all shards; and each file's hash."""
    parts: list[tuple[Ints, Ints]] = []
    hashes = []
    first = 0
    for shard in corpus.shards:
        assert shard.boundaries is not None
        data = read_whole(shard.boundaries)
        hashes.append(hashing.of_bytes(data))
        start, length = parse_boundaries(shard.boundaries, data, shard.num_tokens)
        parts.append((start + first, length))
        first += shard.num_tokens
    return parts, hashes


def _concatenated(parts: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    return np.concatenate([start for start, _ in parts]), np.concatenate([length for _, length in parts])


def _continued(corpus: CorpusFiles, parts: list[tuple[Ints, Ints]]) -> list[int]:
    """Return the shards, last first, whose first document began in the shard before.

    Parts of the format olmo cut through documents. A document continues where one part ends in a document, the next one
    begins with a document, and no EOS is between them. The number of sources decides, where it is stated.
    """
    touching = _touching(corpus, parts)
    boundaries = [corpus.shards[number].boundaries for number in touching]
    if all(file is not None and file.continues for file in boundaries):
        return list(touching)[::-1]
    everything = list(touching)
    without_eos = None if corpus.eos_token_id is None else _without_eos(corpus, touching)
    if corpus.sources_file is None:
        if without_eos is None:
            raise CorpusError(
                f"{corpus.shards[everything[0]].path}: whether its first document continues one of the part before is "
                "unknown without the token that ends documents. Give eos_token_id."
            )
        return without_eos[::-1]
    pieces, sources = sum(len(start) for start, _ in parts), corpus.sources_file.size // 16
    for choice in (without_eos, everything, []):
        if choice is not None and pieces - len(choice) == sources:
            return choice[::-1]
    raise CorpusError(
        f"{corpus.sources_file.path}: lists {sources} documents, but the boundary files hold {pieces} pieces, of which "
        f"{len(everything)} may continue one of the part before. They don't belong together, or eos_token_id "
        f"({corpus.eos_token_id}) is wrong."
    )


def _touching(corpus: CorpusFiles, parts: list[tuple[Ints, Ints]]) -> dict[int, int]:
    """Return the shards that begin with a document where the shard before, their value here, ends with one."""
    found: dict[int, int] = {}
    before = -1
    for number, (shard, (start, _)) in enumerate(zip(corpus.shards, parts, strict=True)):
        if not shard.num_tokens:
            continue
        file = shard.boundaries
        if before >= 0 and file is not None and file.kind == "csv" and file.continues is not False:
            last_start, last_length = parts[before]
            if int(last_start[-1] + last_length[-1]) == int(start[0]):
                found[number] = before
        before = number
    return found


def _without_eos(corpus: CorpusFiles, touching: dict[int, int]) -> list[int]:
    """Return those of `touching` whose predecessor does not end with an EOS."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    last: npt.NDArray[np.unsignedinteger] = np.empty(1, corpus.dtype)
    found = []
    for number, before in touching.items():
        reader.gather([before], [corpus.shards[before].num_tokens - 1], [0], [last.nbytes], last.data.cast("B"))
        if int(last[0]) != corpus.eos_token_id:
            found.append(number)
    return found
