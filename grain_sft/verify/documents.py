"""One pass over the tokens of a corpus, in bounded memory: what a full check needs of each document."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import Corpus

Ints = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]

BLOCK_TOKENS = 1 << 20  # read at once
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_MASK = (1 << 64) - 1


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

    The hash of a document is a polynomial in `_BASE` with its mixed tokens as coefficients. For tokens a to b it is the
    difference of the sums over all tokens before b and before a, divided by a power. So documents may overlap, come in
    any order and be longer than a block.
    """
    start, length = corpus.documents
    stop = start + length
    some = np.flatnonzero(length > 0)
    by_start, by_stop = some[np.argsort(start[some], kind="stable")], some[np.argsort(stop[some], kind="stable")]
    starts, stops = start[by_start], stop[by_stop]
    count = len(start)
    first, last, trainable = (np.zeros(count, np.int64) for _ in range(3))
    hashes = np.zeros(count, np.uint64)
    powers: Hashes = np.full(BLOCK_TOKENS, _BASE, np.uint64)
    powers[0] = 1
    np.cumprod(powers, out=powers)
    hashed = taken = 0  # of all tokens before the block
    for begin in range(0, corpus.num_tokens, BLOCK_TOKENS):
        end = min(begin + BLOCK_TOKENS, corpus.num_tokens)
        tokens, loss = corpus.read(begin, end)
        check(begin, tokens)
        sums = _sums(tokens, powers)
        sums *= np.uint64(pow(_BASE, begin, 1 << 64))
        sums += np.uint64(hashed)
        losses = np.arange(end - begin + 1) if loss is None else np.append(0, np.cumsum(loss != 0, dtype=np.int64))
        losses += taken
        opened = slice(*starts.searchsorted((begin, end)).tolist())
        closed = slice(*stops.searchsorted((begin + 1, end + 1)).tolist())
        at_start, at_stop = starts[opened] - begin, stops[closed] - begin
        first[by_start[opened]], last[by_stop[closed]] = tokens[at_start], tokens[at_stop - 1]
        for figures, totals in ((trainable, losses), (hashes, sums)):
            figures[by_start[opened]] -= totals[at_start]
            figures[by_stop[closed]] += totals[at_stop]
        hashed, taken = int(sums[-1]), int(losses[-1])
    hashes *= _powers_of(_INVERSE, start)
    hashes ^= length.astype(np.uint64) * np.uint64(_BASE)
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


def _sums(tokens: npt.NDArray[np.unsignedinteger], powers: Hashes) -> Hashes:
    mixed = tokens.astype(np.uint64)
    mixed += np.uint64(0xD1B54A32D192ED03)
    mixed *= np.uint64(0xAEF17502108EF2D9)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xDB4F0B9175AE2165)
    mixed *= powers[: len(mixed)]
    sums = np.zeros(len(mixed) + 1, np.uint64)
    np.cumsum(mixed, out=sums[1:])
    return sums


def _powers_of(base: int, exponents: Ints) -> Hashes:
    """Return base ** each exponent, modulo 2**64, by squaring."""
    found = np.ones(len(exponents), np.uint64)
    for bit in range(int(exponents.max(initial=0)).bit_length()):
        found[(exponents >> bit) & 1 == 1] *= np.uint64(base)
        base = base * base & _MASK
    return found
