"""Order episode: that of the episode-indexed loader, `RandomState(seed + epoch).permutation(n)`, bit for bit."""

from grain_sft.errors import SamplerError
from grain_sft.sampling.orders.order import CacheDir, Order, RowsAt
from grain_sft.sampling.orders.stored import Generator, stored_order

_SEEDS = 1 << 32


def _generator(seed: int, epoch: int) -> Generator:
    if seed + epoch >= _SEEDS:
        raise SamplerError(
            f"seed={seed}, epoch {epoch}: order 'episode' seeds numpy's RandomState with their sum, which takes 0 to "
            f"{_SEEDS - 1}. Take a smaller seed."
        )
    return "RandomState", seed + epoch


def _make(num_rows: int, *, seed: int, cache_dir: CacheDir) -> RowsAt:
    _generator(seed, 0)  # refuse the seed now
    return stored_order("episode", _generator)(num_rows, seed=seed, cache_dir=cache_dir)


EPISODE = Order(_make, epoch_seed=lambda seed, epoch: seed + epoch)
