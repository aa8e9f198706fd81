"""Order random: draws with replacement."""

import hashlib

import numpy as np

from grain_sft.sampling.orders.order import CacheDir, Ints, Order, RowsAt

_VALUES_PER_COUNT = 4  # 64-bit values that Philox makes of one count


def random(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    """Return draws with replacement: draw g = epoch * num_rows + index of a run is a function of (seed, g).

    It is value g of Philox 4x64, whose key is a hash of the seed, modulo the number of rows (which favours some rows by
    less than n / 2^64). The values are our own: the episode-indexed loader draws them one after the other from one
    RandomState, so that its runs cannot be entered in the middle.
    """
    digest = hashlib.blake2b(f"grain_sft random:{seed}".encode(), digest_size=16).digest()
    key = int.from_bytes(digest, "little")

    def rows_at(epoch: int, indices: Ints) -> Ints:
        if not len(indices):
            return indices
        lowest = int(indices.min())
        count, skipped = divmod(epoch * num_rows + lowest, _VALUES_PER_COUNT)
        values = np.random.Philox(key=key, counter=count).random_raw(skipped + int(indices.max()) - lowest + 1)
        return (values[indices + (skipped - lowest)] % np.uint64(num_rows)).astype(np.int64)

    return rows_at


RANDOM = Order(random, runs_on=True)
