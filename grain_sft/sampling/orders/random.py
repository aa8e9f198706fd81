"""Order random: draws with replacement."""

import hashlib

import numpy as np

from grain_sft.sampling.orders.order import CacheDir, Ints, Order, RowsAt

_VALUES_PER_COUNT = 4  # 64-bit values that Philox generates from one counter


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


RANDOM = Order(random, runs_on=True)
