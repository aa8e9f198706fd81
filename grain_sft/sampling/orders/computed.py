"""Orders that are computed index by index, at constant memory: shuffle, random and sequential."""

import functools
import hashlib

import numpy as np
from grain.experimental import index_shuffle

from grain_sft.sampling.orders.order import EPOCHS_KEPT, CacheDir, Ints, Order, RowsAt

_FEW_ROWS = 1 << 16
_ROUNDS = 8
_VALUES_PER_COUNT = 4  # 64-bit values that Philox generates from one counter


def shuffle(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return a keyed permutation, computed with `grain.experimental.index_shuffle`.

    Advantages: constant memory, and constant time per index, at any number of rows.
    Disadvantages: it is one of 2^32 permutations per number of rows (the key is 32 bits of a hash of seed and epoch), and it
    takes 5 to 10 microseconds an index in Python, in the prefetching thread: up to 40 ms for a host that reads 4,000 rows a
    step. It is not cryptographic. It takes 8 rounds, where Grain's own shuffle takes 4: with 4, the permutations of two keys
    are visibly correlated. Below 2^16 rows, where `index_shuffle` slows down, an epoch is numpy's shuffle, kept whole.
    """

    @functools.lru_cache(maxsize=EPOCHS_KEPT)
    def whole(epoch: int) -> Ints:
        return np.random.Generator(np.random.PCG64(_key(seed, epoch))).permutation(num_rows)

    def rows_at(epoch: int, indices: Ints) -> Ints:
        last, key = num_rows - 1, _key(seed, epoch)
        return np.array([index_shuffle(index, last, key, _ROUNDS) for index in indices.tolist()], np.int64)

    return rows_at if num_rows >= _FEW_ROWS else lambda epoch, indices: whole(epoch)[indices]


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> int:
    """Return 32 bits of a hash of both. Unlike seed + epoch, no epoch of one seed is an epoch of the next seed."""
    digest = hashlib.blake2b(f"grain_sft shuffle:{seed}:{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def random(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return an order that draws rows with replacement. Draw g = epoch * num_rows + index is a function of (seed, g).

    Draw g is value g of Philox 4x64 modulo `num_rows`; the key is a hash of the seed. The modulo favours some rows by
    less than num_rows / 2^64. The draws differ from those of the episode-indexed loader: that loader takes them one
    after the other from one RandomState, so its runs cannot start in the middle.
    """
    digest = hashlib.blake2b(f"grain_sft random:{seed}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")

    def rows_at(epoch: int, indices: Ints) -> Ints:
        if not len(indices):
            return indices
        lowest = int(indices.min())
        counter, skipped = divmod(epoch * num_rows + lowest, _VALUES_PER_COUNT)
        values = np.random.Philox(key=key, counter=counter).random_raw(skipped + int(indices.max()) - lowest + 1)
        return (values[indices + (skipped - lowest)] % np.uint64(num_rows)).astype(np.int64)

    return rows_at


def _sequential(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    return lambda epoch, indices: indices


SHUFFLE = Order(shuffle)
RANDOM = Order(random, runs_on=True)
SEQUENTIAL = Order(_sequential, sequential=True)
