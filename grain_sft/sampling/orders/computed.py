"""Orders that compute the row at any index of an epoch: shuffle, grain, random and sequential."""

import functools
import hashlib

import numpy as np

from grain_sft.errors import SamplerError
from grain_sft.sampling.orders.index_shuffle import has_every_row, permuted
from grain_sft.sampling.orders.order import CacheDir, Order, RowsAt, cached_by_epoch
from grain_sft.types import Ints

_FEW_ROWS = 1 << 16  # with fewer rows, the rows of an epoch are computed at once and kept
_ROUNDS, _GRAIN_ROUNDS = 8, 4  # rounds of the cipher in `index_shuffle`, for orders `shuffle` and `grain`
_KEYS = 1 << 32  # number of keys of the cipher
_VALUES_PER_COUNT = 4  # 64-bit values that Philox generates from one counter


def shuffle(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return an order in which a hash of the seed and the epoch chooses the permutation of each epoch.

    Advantages: constant memory, and constant time per index, at any number of rows.
    Disadvantages: the key has 32 bits, so there are at most 2^32 permutations of the rows. An index takes 6 microseconds if few
    indices are requested at once, and 0.3 to 0.7 microseconds if thousands are.

    The permutation is that of `grain.experimental.index_shuffle` with 8 rounds. With the 4 rounds of Grain's own shuffle, the
    permutations of two keys are visibly correlated. Below 2^16 rows, `index_shuffle` is slow, so numpy permutes an epoch.
    """
    if num_rows < _FEW_ROWS:
        return cached_by_epoch(lambda epoch: np.random.Generator(np.random.PCG64(_key(seed, epoch))).permutation(num_rows))
    return lambda epoch, indices: permuted(indices, num_rows, _key(seed, epoch), _ROUNDS)


def grain(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return the order of `grain.MapDataset.shuffle(seed).repeat()`, in constant memory.

    Disadvantages: epoch e of seed s is epoch 0 of seed s + e, and permutations of two seeds are visibly correlated.
    """
    if seed >= _KEYS:
        raise SamplerError(f"seed={seed}: order 'grain' takes seeds below {_KEYS}, as Grain does. Give a smaller seed.")
    if not has_every_row(num_rows):
        found = f"{num_rows} rows in order 'grain': Grain's shuffle of this number has one row twice, and lacks another"
        raise SamplerError(f"{found}. Take order 'shuffle'.")

    def rows_at(epoch: int, indices: Ints) -> Ints:
        return permuted(indices, num_rows, _grain_seed(seed, epoch), _GRAIN_ROUNDS)

    # `permuted` is slow if there are few rows, so an epoch of them is computed once and kept
    return cached_by_epoch(lambda epoch: rows_at(epoch, np.arange(num_rows))) if num_rows < _FEW_ROWS else rows_at


def _grain_seed(seed: int, epoch: int) -> int:
    return (seed + epoch) % _KEYS


@functools.lru_cache(maxsize=64)
def _key(seed: int, epoch: int) -> int:
    """Return 32 bits of a hash of seed and epoch. With `seed + epoch`, epoch 1 of seed 0 would equal epoch 0 of seed 1."""
    digest = hashlib.blake2b(f"grain_sft shuffle:{seed}:{epoch}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def random(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return an order that draws rows with replacement.

    Philox 4x64 generates values v[0], v[1], ... The row at an index is v[epoch * num_rows + index] % num_rows. The modulo
    favours some rows by less than num_rows / 2^64.
    """
    digest = hashlib.blake2b(f"grain_sft random:{seed}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")

    def rows_at(epoch: int, indices: Ints) -> Ints:
        """Return the rows. This generates all draws from the lowest to the highest of `indices`, at 8 bytes each."""
        if not len(indices):
            return indices
        first_draw = epoch * num_rows + int(indices.min())
        last_draw = epoch * num_rows + int(indices.max())
        # Philox starts at a counter, so up to three values before the first draw are generated, too
        counter = first_draw // _VALUES_PER_COUNT
        first_value = counter * _VALUES_PER_COUNT
        values = np.random.Philox(key=key, counter=counter).random_raw(last_draw - first_value + 1)
        return (values[indices + (epoch * num_rows - first_value)] % np.uint64(num_rows)).astype(np.int64)

    return rows_at


def _sequential(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    return lambda epoch, indices: indices


SHUFFLE = Order(shuffle)
GRAIN = Order(grain, runs_on=True, epoch_seed=_grain_seed)
RANDOM = Order(random, runs_on=True)
SEQUENTIAL = Order(_sequential, sequential=True)
