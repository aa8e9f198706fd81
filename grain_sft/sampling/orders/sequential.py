"""Order sequential: rows as they are numbered."""

from grain_sft.sampling.orders.order import CacheDir, Order, RowsAt


def _make(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    return lambda epoch, indices: indices


SEQUENTIAL = Order(_make, sequential=True)
