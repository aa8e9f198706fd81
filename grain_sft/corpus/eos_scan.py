"""Documents by EOS tokens: a scan of all tokens, which hashes them at the same time."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import content
from grain_sft.corpus.corpus_files import CorpusFiles
from grain_sft.corpus.documents import Documents, Ints
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import ShardReader, artifact, hashing

_SCAN_BYTES = hashing.BLOCK
_ARRAYS = ("start", "length", "highest_token")
_KEPT_FROM = 1 << 23  # bytes of tokens; fewer are scanned in a millisecond


def count_token(corpus: CorpusFiles, token: int) -> int:
    """Return the number of occurrences of `token`."""
    return sum(int(np.count_nonzero(chunk == token)) for _, _, chunk in _chunks(corpus))


def by_eos(corpus: CorpusFiles, bos_token_id: int | None = None) -> Documents:
    """Return the documents that end at each EOS, EOS included. Tokens after a shard's last EOS are in no document.

    The result for a corpus of more than a few MB is kept in the folder `documents` of the cache.

    Args:
      corpus: Corpus with an `eos_token_id`.
      bos_token_id: Token that has to follow an EOS, unless it is a shard's last token, for it to end a document.
    """
    if corpus.eos_token_id is None:
        raise CorpusError(
            f"{corpus.shards[0].path}: where documents end is not known: no boundary files. Give eos_token_id, the token "
            "that ends each."
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
                raise CorpusFileError(
                    f"{corpus.shards[0].path}, or another file of its corpus, was written to during the search for "
                    "documents. Wait until the files are complete, then open the corpus again."
                )
            return made

        depends = {"documents": 3, "content": content.content_of_tokens(corpus, hashes, bos_token_id)}
        check = functools.partial(_check_documents, corpus.num_tokens)
        arrays = artifact.load_or_make("documents", depends, make, check=check)
    start, length, highest = (arrays[name].view(np.ndarray) for name in _ARRAYS)
    key = content.content_of_tokens(corpus, hashes, bos_token_id)
    return Documents(start, length, int(highest[0]), key, content.hash_of_tokens(corpus, hashes))


def _check_documents(num_tokens: int, arrays: artifact.Arrays) -> None:
    """Raise ValueError for arrays that no scan returns."""
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
    number, after, waiting, highest = -1, 0, False, 0
    with hashing.BlockHasher(len(corpus.shards)) as hasher:
        for shard, first, chunk in _chunks(corpus):
            hasher.add(shard, chunk.data)
            highest = max(highest, int(chunk.max()))
            found = np.flatnonzero(chunk == corpus.eos_token_id)
            if shard != number:
                number, after, waiting = shard, first, False
                last = first + corpus.shards[shard].num_tokens
            if bos_token_id is not None:
                inside = found[found < len(chunk) - 1]
                kept = inside[chunk[inside + 1] == bos_token_id]
                at_end = len(found) > len(inside)
                if waiting and chunk[0] == bos_token_id:  # the chunk before ended in an EOS
                    kept = np.append(np.int64(-1), kept)
                if at_end and first + len(chunk) == last:
                    kept = np.append(kept, found[-1])
                found, waiting = kept, at_end
            if len(found):
                found = found + (first + 1)
                starts.append(np.concatenate([[after], found[:-1]]))
                ends.append(found)
                after = int(found[-1])
        hashes = [hasher.joined(shard) for shard in range(len(corpus.shards))]
    start = np.concatenate(starts)
    values = start, np.concatenate(ends) - start, np.array([min(highest, np.iinfo(np.int64).max)], np.int64)
    return dict(zip(_ARRAYS, values, strict=True)), hashes


def _chunks(corpus: CorpusFiles) -> Iterator[tuple[int, int, npt.NDArray[np.unsignedinteger]]]:
    """Yield (shard, token offset in the corpus, tokens) of all tokens, each chunk in memory of its own."""
    reader = ShardReader(corpus.shards, corpus.dtype.itemsize, 1, remote=corpus.remote)
    per_chunk = _SCAN_BYTES // corpus.dtype.itemsize
    before = 0
    for number, shard in enumerate(corpus.shards):
        for start in range(0, shard.num_tokens, per_chunk):
            chunk: npt.NDArray[np.unsignedinteger] = np.empty(min(per_chunk, shard.num_tokens - start), corpus.dtype)
            reader.gather([number], [start], [0], [chunk.nbytes], memoryview(chunk.data).cast("B"))
            yield number, before + start, chunk
        before += shard.num_tokens
