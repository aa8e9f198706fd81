"""Documents of a corpus: where each begins and ends, from boundary files or from EOS tokens, and reading them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content, eos_scan
from grain_sft.corpus.boundaries import parse_boundaries
from grain_sft.corpus.document_keys import content_of_boundaries, content_of_tokens, hash_of_tokens, hashed_of
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import FileStamp, ShardReader, hashing, read_whole
from grain_sft.storage import artifact as artefact

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

Ints = npt.NDArray[np.int64]

_KEPT_FROM = 1 << 23  # bytes of tokens: what is less is scanned in a millisecond
_BLOCK_TOKENS = 1 << 20  # read at once when documents are iterated


class Document(NamedTuple):
    """One document: its tokens, what of them takes loss, and where it comes from.

    Attributes:
      tokens: uint32 [n].
      loss: bool [n], or float32 [n] (weights); value i is of token i as a target, not shifted.
      source: (number of the input, line or row in it from 1), where the corpus knows.
    """

    tokens: npt.NDArray[np.uint32]
    loss: npt.NDArray[Any]
    source: tuple[int, int] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Documents:
    """First token and length of every document, in order; `start, length = documents` too.

    Attributes:
      start: int64 [documents], counted in the tokens of all shards, one after the other.
      length: int64 [documents].
      highest_token: of all tokens, where finding the documents read all of them; else None.
      content: hash of all bytes that decide where these documents are: of the boundary files, or of every token.
      tokens: hash of every token, where finding the documents read all of them; else None.
    """

    start: Ints
    length: Ints
    highest_token: int | None = None
    content: str = ""
    tokens: str | None = None

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Ints]:
        return iter((self.start, self.length))


def find_documents(corpus: Corpus) -> Documents:
    """The documents of all shards.

    Raises:
      CorpusFileError: a file is missing, or not the one that was indexed.
      CorpusError: boundary files that are damaged or don't fit, or neither boundary files nor an `eos_token_id`.
    """
    with_files = [shard.boundaries is not None for shard in corpus.shards]
    if not any(with_files):
        return by_eos(corpus)
    if not all(with_files):
        raise CorpusError(
            f"{corpus.shards[with_files.index(False)].path}: has no document boundaries, but others have."
        )
    parts, hashes = _parts(corpus)
    joined = _continued(corpus, parts) if len(parts) > 1 else []
    for number in joined:
        before = number - 1
        while not len(parts[before][0]):
            before -= 1
        parts[before][1][-1] += parts[number][1][0]
        parts[number] = (parts[number][0][1:], parts[number][1][1:])
    return Documents(*_one_after_the_other(parts), content=content_of_boundaries(corpus, hashes))


def part_by_part(corpus: Corpus) -> Documents:
    """The documents of all boundary files, which every shard has, none of them joined with one of the part before.

    Raises: as `find_documents`.
    """
    return Documents(*_one_after_the_other(_parts(corpus)[0]))


def _parts(corpus: Corpus) -> tuple[list[tuple[Ints, Ints]], list[str]]:
    """(start, length) of the documents of each boundary file, counted in the tokens of all shards; and the hash of each
    file's bytes."""
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


def _one_after_the_other(parts: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    return np.concatenate([start for start, _ in parts]), np.concatenate([length for _, length in parts])


def _continued(corpus: Corpus, parts: list[tuple[Ints, Ints]]) -> list[int]:
    """Shards, from the last on, whose first document began in the shard before.

    Parts of the format olmo cut through documents: a document goes on where one part ends in a document, the next
    begins with one, and no EOS is between them. The number of sources, where there are any, has the last word.
    """
    touching = _touching(corpus, parts)
    stated = [corpus.shards[number].boundaries for number in touching]
    if all(file is not None and file.continues for file in stated):
        return list(touching)[::-1]
    everything = list(touching)
    without_eos = None if corpus.eos_token_id is None else _without_eos(corpus, touching)
    if corpus.sources_file is None:
        if without_eos is None:
            raise CorpusError(
                f"{corpus.shards[everything[0]].path}: whether its first document goes on from the part before can't be "
                "told without the token that ends documents: give eos_token_id."
            )
        return without_eos[::-1]
    pieces, sources = sum(len(start) for start, _ in parts), corpus.sources_file.size // 16
    for choice in (without_eos, everything, []):
        if choice is not None and pieces - len(choice) == sources:
            return choice[::-1]
    raise CorpusError(
        f"{corpus.sources_file.path}: lists {sources} documents, but the boundary files hold {pieces} pieces, of which "
        f"{len(everything)} may go on from the part before. They don't belong together, or eos_token_id "
        f"({corpus.eos_token_id}) is wrong."
    )


def _touching(corpus: Corpus, parts: list[tuple[Ints, Ints]]) -> dict[int, int]:
    """Shards that begin with a document where the shard before, their value here, ends with one."""
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


def _without_eos(corpus: Corpus, touching: dict[int, int]) -> list[int]:
    """Those of `touching` whose predecessor does not end with an EOS."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    last: npt.NDArray[np.unsignedinteger] = np.empty(1, corpus.dtype)
    found = []
    for number, before in touching.items():
        reader.gather([before], [corpus.shards[before].num_tokens - 1], [0], [last.nbytes], last.data.cast("B"))
        if int(last[0]) != corpus.eos_token_id:
            found.append(number)
    return found


def read_sources(file: FileStamp, documents: int) -> Ints:
    """int64 [documents, 2]: input and line of each document.

    Raises:
      CorpusFileError: missing, or not the one that was indexed.
      CorpusError: of another number of documents.
    """
    data = read_whole(file)
    if len(data) != 16 * documents:
        raise CorpusError(
            f"{file.path}: {len(data)} bytes; expected {16 * documents}, 16 for each of {documents} documents. "
            "It is damaged, or of another corpus."
        )
    return np.frombuffer(data, "<i8").astype(np.int64).reshape(-1, 2)


def iterate(corpus: Corpus) -> Iterator[Document]:
    """Every document in order, some MB read at a time. Arrays of documents are parts of such a block: copy what is
    to be kept for long."""
    start, length, sources = corpus.documents.start, corpus.documents.length, corpus.sources
    stop = start + length
    breaks = np.append(np.flatnonzero(start[1:] < stop[:-1]) + 1, len(start))  # where the order turns back
    first = 0
    while first < len(start):
        end = int(breaks[np.searchsorted(breaks, first, side="right")])
        last = first + max(1, int(np.searchsorted(stop[first:end], start[first] + _BLOCK_TOKENS, side="right")))
        begin = int(start[first])
        tokens, loss = corpus.read(begin, int(stop[last - 1]))
        tokens = as_uint32(tokens)
        if loss is None:
            loss = np.ones(len(tokens), np.bool_)
        froms, tos = (start[first:last] - begin).tolist(), (stop[first:last] - begin).tolist()
        block = [None] * (last - first) if sources is None else map(tuple, sources[first:last].tolist())
        for at, to, source in zip(froms, tos, block, strict=True):
            yield Document(tokens[at:to], loss[at:to], source)
        first = last


def as_uint32(tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """`tokens` as uint32.

    Raises:
      CorpusError: an id that uint32 can't hold.
    """
    if tokens.dtype.itemsize > 4 and len(tokens) and int(tokens.max()) > np.iinfo(np.uint32).max:
        raise CorpusError(
            f"a token id of {int(tokens.max())}: no vocabulary has it. The corpus was opened with the wrong dtype."
        )
    return tokens.astype(np.uint32, copy=False)


def by_eos(corpus: Corpus, bos_token_id: int | None = None) -> Documents:
    """A document ends at each EOS, EOS included; tokens after a shard's last EOS are no document. What was found in a
    corpus of some MB and more is kept, as plans are: in the folder `documents` of the cache.

    Args:
      bos_token_id: an EOS ends a document only where this token follows, or nothing.

    Raises:
      CorpusFileError: a shard is missing or is not the one that was indexed.
      CorpusError: the corpus has no `eos_token_id`.
    """
    if corpus.eos_token_id is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: where documents end is not known: no boundary files. Give eos_token_id, the token "
            "that ends each."
        )
    made: dict[str, Ints] = {}

    def scan() -> list[str]:
        arrays, hashes = eos_scan.scan(corpus, bos_token_id)
        made.update(arrays)
        return hashes

    if corpus.num_tokens * corpus.dtype.itemsize < _KEPT_FROM:
        return _found(corpus, made, scan(), bos_token_id)
    hashes = content.hashes_of(corpus.shards, scan, of=hashed_of(corpus))
    depends = {"documents": 3, "content": content_of_tokens(corpus, hashes, bos_token_id)}

    def make() -> dict[str, Ints]:
        if not made and scan() != hashes:
            raise CorpusFileError(
                f"{corpus.shards[0].path}, or another file of its corpus, was written to while its documents were looked "
                "for. Wait until the files are complete, then open the corpus again."
            )
        return made

    check = functools.partial(_check_documents, corpus)
    kept = artefact.load_or_make("documents", depends, make, check=check)
    return _found(corpus, {name: array.view(np.ndarray) for name, array in kept.items()}, hashes, bos_token_id)


def _found(corpus: Corpus, arrays: dict[str, Ints], hashes: list[str], bos_token_id: int | None) -> Documents:
    return Documents(
        arrays["start"],
        arrays["length"],
        int(arrays["highest_token"][0]),
        content_of_tokens(corpus, hashes, bos_token_id),
        hash_of_tokens(corpus, hashes),
    )


def _check_documents(corpus: Corpus, arrays: artefact.Arrays) -> None:
    """Check that the arrays can be what a scan gives.

    Raises:
      ValueError: they can't.
    """
    start, length, highest = (arrays.get(name) for name in ("start", "length", "highest_token"))
    if start is None or length is None or highest is None or start.ndim != 1 or start.shape != length.shape:
        raise ValueError("it lacks an array")
    if any(array.dtype != np.int64 for array in (start, length, highest)) or highest.shape != (1,):
        raise ValueError("its arrays are not int64 [documents]")
    most = corpus.num_tokens
    if len(start) and (start.min() < 0 or length.min() < 1 or start.max() >= most or length.max() > most):
        raise ValueError("a document lies outside the corpus")
    stop = start + length
    if (start[1:] < stop[:-1]).any() or (len(stop) and stop[-1] > most):
        raise ValueError("its documents overlap or lie outside the corpus")
