"""Orders that are computed index by index, at constant memory: shuffle, grain, random and sequential."""

import functools
import hashlib

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.orders.index_shuffle import has_every_row, permuted, whole_order
from grain_sft.sampling.orders.order import CacheDir, Ints, Order, RowsAt, kept_by_epoch

_FEW_ROWS = 1 << 16
_ROUNDS, _GRAIN_ROUNDS = 8, 4
_KEYS = 1 << 32
_VALUES_PER_COUNT = 4  # 64-bit values that Philox generates from one counter


def shuffle(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return a keyed permutation: that of `grain.experimental.index_shuffle`, of many indices at once.

    Advantages: constant memory, and constant time per index, at any number of rows.
    Disadvantages: it is one of 2^32 permutations per number of rows (the key is 32 bits of a hash of seed and epoch), and it
    takes 6 microseconds an index for few indices, 0.3 to 0.7 for thousands: 3 ms for a host that reads 4,000 rows a step. It is
    not cryptographic. It has 8 rounds, because with the 4 of Grain's own shuffle the permutations of two keys are visibly
    correlated. Below 2^16 rows, where the library slows down, an epoch is numpy's permutation, kept in memory.
    """

    if num_rows < _FEW_ROWS:
        return kept_by_epoch(
            lambda epoch: np.random.Generator(np.random.PCG64(_key(seed, epoch))).permutation(num_rows)
        )
    return lambda epoch, indices: permuted(indices, num_rows, _key(seed, epoch), _ROUNDS)


def grain(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return the order of `grain.MapDataset.shuffle(seed)`, followed by `repeat`: constant memory, as `shuffle`.

    Disadvantages: epoch e of seed s is epoch 0 of seed s + e, and permutations of two keys are visibly correlated.
    """
    if seed >= _KEYS:
        raise SamplerError(f"seed={seed}: order 'grain' takes seeds below {_KEYS}, as Grain does. Give a smaller seed.")
    if not has_every_row(num_rows):
        found = f"{num_rows} rows in order 'grain': Grain's shuffle of this number has one row twice and one never"
        raise SamplerError(f"{found}. Take order 'shuffle'.")
    if num_rows < _FEW_ROWS:
        return kept_by_epoch(lambda epoch: whole_order(num_rows, _grain_seed(seed, epoch), _GRAIN_ROUNDS))
    return lambda epoch, indices: permuted(indices, num_rows, _grain_seed(seed, epoch), _GRAIN_ROUNDS)


def _grain_seed(seed: int, epoch: int) -> int:
    return (seed + epoch) % _KEYS


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> int:
    """Return 32 bits of a hash of both. With seed + epoch instead, epochs of one seed would be epochs of the next seed."""
    digest = hashlib.blake2b(f"grain_sft shuffle:{seed}:{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def random(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return an order that draws rows with replacement. Draw g = epoch * num_rows + index is a function of (seed, g).

    Draw g is value g of Philox 4x64 modulo `num_rows`; the key is a hash of the seed. The modulo favours some rows by
    less than num_rows / 2^64. The draws differ from those of the episode-indexed loader, which takes them one after the other
    from one RandomState, so that its runs cannot start in the middle.
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
GRAIN = Order(grain, runs_on=True, epoch_seed=_grain_seed)
RANDOM = Order(random, runs_on=True)
SEQUENTIAL = Order(_sequential, sequential=True)
