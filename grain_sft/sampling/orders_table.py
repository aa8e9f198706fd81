"""Orders: which row stands at a place of an epoch. One function each, chosen by name.

An order is called with an epoch (from 0) and places (int64 [n], each below the number of rows) and returns the rows
that stand there (int64 [n]); over all places of an epoch, every row once (but for `random`, which draws).
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from grain.experimental import index_shuffle

from grain_sft.errors import SamplerError
from grain_sft.sampling.permutations import load_permutation, release

Rows = npt.NDArray[np.int64]
Order = Callable[[int, Rows], Rows]
MakeOrder = Callable[[int, int, str | os.PathLike[str] | None], Order]

_FEW_ROWS = 1 << 16
_ROUNDS = 8
_EPOCHS_KEPT = 2  # a batch may straddle two
_RANDOM_STATE_SEEDS = 1 << 32
_LANES = 4  # 64-bit values that Philox makes of one count


def sequential(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """Rows as they are numbered."""
    return lambda epoch, places: places


def shuffle(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """A keyed pseudo-random permutation, computed place by place (`grain.experimental.index_shuffle`).

    Advantages: constant memory and constant time a place, at any number of rows; nothing is stored.
    Limits: it is one of 2^32 permutations per number of rows, not any of the n! that a true shuffle reaches (the key is
    32 bits of a hash of seed and epoch). It takes 8 rounds, where Grain's own shuffle takes 4, with which the
    permutations of two keys are visibly correlated. No cryptography. 5 to 10 microseconds a place in Python: a host
    that reads 4,000 rows a step spends up to 40 ms a step here, in the prefetching thread. Below 2^16 rows, where
    `index_shuffle` is slower the fewer rows there are (0.5 ms a place of 90), an epoch is numpy's shuffle, kept whole.
    """
    last = num_rows - 1
    if num_rows < _FEW_ROWS:

        @functools.lru_cache(maxsize=_EPOCHS_KEPT)
        def whole(epoch: int) -> Rows:
            return np.random.Generator(np.random.PCG64(_key(seed, epoch))).permutation(num_rows)

        return lambda epoch, places: whole(epoch)[places]

    def at(epoch: int, places: Rows) -> Rows:
        key = _key(seed, epoch)
        return np.array([index_shuffle(place, last, key, _ROUNDS) for place in places.tolist()], np.int64)

    return at


def olmo(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """OLMo-core's order, exactly: `Generator(PCG64(seed + e)).shuffle`, e from 1."""
    return _stored("olmo", num_rows, seed, folder)


def maxtext(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """MaxText's `olmo_grain` permutation, exactly. Its hosts take contiguous blocks of it: see `IndexSampler`."""
    return _stored("maxtext", num_rows, seed, folder)


def episode(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """The episode-indexed loader's order, exactly: `RandomState(seed + e).permutation(n)`, e from 0.

    Raises:
      SamplerError: here or in an epoch, where seed + e is no seed of RandomState.
    """
    stored = _stored("episode", num_rows, seed, folder)

    def check(epoch: int) -> None:
        if seed + epoch >= _RANDOM_STATE_SEEDS:
            raise SamplerError(
                f"seed={seed}, epoch {epoch}: order 'episode' seeds numpy's RandomState with their sum, which takes 0 to "
                f"{_RANDOM_STATE_SEEDS - 1}. Take a smaller seed."
            )

    def at(epoch: int, places: Rows) -> Rows:
        check(epoch)
        return stored(epoch, places)

    check(0)
    return at


def openchat(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """The order in which OpenChat takes documents, exactly: `default_rng(seed + e).permutation(n)`, e from 0. Its batches
    of several documents a row are made of this order by the layout algorithm "multipack"."""
    return _stored("openchat", num_rows, seed, folder)


def random(num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """Draws with replacement: draw number g of a run, g = epoch * num_rows + place, is a function of (seed, g).

    Value g of Philox 4x64, whose key is a hash of the seed, modulo the number of rows (which favours some rows by less
    than n / 2^64). The values are ours: the episode-indexed loader takes them one after the other from one RandomState,
    so that a run can't be entered in its middle; nothing else would differ.
    """
    digest = hashlib.blake2b(f"grain_sft random:{seed}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")

    def at(epoch: int, places: Rows) -> Rows:
        if not len(places):
            return places
        lowest = int(places.min())
        block, skip = divmod(epoch * num_rows + lowest, _LANES)
        values = np.random.Philox(key=key, counter=block).random_raw(skip + int(places.max()) - lowest + 1)
        return (values[places + (skip - lowest)] % np.uint64(num_rows)).astype(np.int64)

    return at


ORDERS: dict[str, MakeOrder] = {
    "shuffle": shuffle,
    "olmo": olmo,
    "maxtext": maxtext,
    "episode": episode,
    "openchat": openchat,
    "random": random,
    "sequential": sequential,
}
WITHOUT_EPOCHS = ("maxtext", "random")
"""Orders whose epochs don't end with a step, whatever `last_batch` says."""


def make_order(name: str, num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    """The order of that name.

    Raises:
      SamplerError: no such order, or a number of rows that it can't permute.
    """
    if not isinstance(name, str) or name not in ORDERS:
        raise SamplerError(f"order={name!r}: expected one of {', '.join(ORDERS)}.")
    return ORDERS[name](num_rows, seed, folder)


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> int:
    """32 bits of a hash of both: unlike seed + epoch, no epoch of one seed is an epoch of the next."""
    digest = hashlib.blake2b(f"grain_sft shuffle:{seed}:{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def _stored(kind: str, num_rows: int, seed: int, folder: str | os.PathLike[str] | None) -> Order:
    @functools.lru_cache(maxsize=_EPOCHS_KEPT)
    def permutation(epoch: int) -> npt.NDArray[np.unsignedinteger]:
        return load_permutation(kind, num_rows, seed, epoch, folder)

    def at(epoch: int, places: Rows) -> Rows:
        rows = permutation(epoch)
        found = rows[places].astype(np.int64)
        release(rows)
        return found

    return at
