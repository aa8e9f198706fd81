"""One pass over the tokens of a corpus, in bounded memory: what a full check needs of each document."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

BLOCK_TOKENS = 1 << 20  # read at once


class ScannedDocuments(NamedTuple):
    """First and last token, number of trainable tokens, and hash of each document, [documents]; zeros for an empty one.

    Hashes of documents with other tokens are equal once in 2**64 times.
    """

    first: Ints
    last: Ints
    trainable: Ints
    hash: Hashes


def scan_documents(corpus: Corpus, check: Callable[[int, npt.NDArray[np.unsignedinteger]], None]) -> ScannedDocuments:
    """Read all tokens and their loss once, and call `check` with the number of the first token and the tokens of each block.

    Documents may overlap, come in any order and be longer than a block.
    """
    start, length = corpus.documents
    order = np.flatnonzero(length > 0)
    order = order[np.argsort(start[order], kind="stable")]
    starts, stop = start[order], start + length
    first, last, trainable, hashes = (
        np.zeros(len(start), dtype) for dtype in (np.int64, np.int64, np.int64, np.uint64)
    )
    begun: dict[int, Any] = {}  # hash of each document that continues in the next block
    for begin in range(0, corpus.num_tokens, BLOCK_TOKENS):
        end = min(begin + BLOCK_TOKENS, corpus.num_tokens)
        tokens, loss = corpus.read(begin, end)
        check(begin, tokens)
        here = np.append(np.array(list(begun), np.int64), order[slice(*starts.searchsorted((begin, end)).tolist())])
        from_, to = np.maximum(start[here] - begin, 0), np.minimum(stop[here] - begin, end - begin)
        new, done = start[here] >= begin, stop[here] <= end
        first[here[new]], last[here[done]] = tokens[from_[new]], tokens[to[done] - 1]
        taken = np.arange(len(tokens) + 1) if loss is None else np.append(0, np.cumsum(loss != 0, dtype=np.int64))
        trainable[here] += taken[to] - taken[from_]
        content = tokens.data.cast("B")
        width = tokens.itemsize
        for number, one, other, whole in zip(
            here.tolist(), (from_ * width).tolist(), (to * width).tolist(), done.tolist(), strict=True
        ):
            digest = begun.pop(number, None) or hashlib.blake2b(digest_size=8)
            digest.update(content[one:other])
            if whole:
                hashes[number] = int.from_bytes(digest.digest(), "little")
            else:
                begun[number] = digest
    return ScannedDocuments(first, last, trainable, hashes)


class Duplicates(NamedTuple):
    """Groups of documents with the same tokens.

    `documents` and their `tokens` could be left out: of each group all but one. `first` has the two lowest numbers of the group
    that begins first.
    """

    documents: int
    groups: int
    tokens: int
    first: tuple[int, int] | None


def find_duplicates(hashes: Hashes, length: Ints) -> Duplicates:
    """Return the duplicates, by hash and length; empty documents do not count."""
    some = np.flatnonzero(length > 0)
    order = some[np.lexsort((some, length[some], hashes[some]))]
    equal = (hashes[order[1:]] == hashes[order[:-1]]) & (length[order[1:]] == length[order[:-1]])
    more = np.flatnonzero(equal) + 1
    seconds = more[~np.insert(equal, 0, False)[more - 1]]  # of each group
    first = None
    if len(seconds):
        at = seconds[order[seconds - 1].argmin()]
        first = int(order[at - 1]), int(order[at])
    return Duplicates(len(more), len(seconds), int(length[order[more]].sum()), first)
