"""Orders of other systems, bit for bit: each epoch is a permutation by a generator of numpy."""

import hashlib

from grain_sft.errors import SamplerError
from grain_sft.sampling.orders.order import Order
from grain_sft.sampling.orders.stored import stored_order

_SEEDS = 1 << 32


def _olmo_seed(seed: int, epoch: int) -> int:
    return seed + epoch + 1  # OLMo-core's epochs count from 1


def _sum(seed: int, epoch: int) -> int:
    return seed + epoch


def _episode_seed(seed: int, epoch: int) -> int:
    if seed + epoch >= _SEEDS:
        raise SamplerError(
            f"seed={seed}, epoch {epoch}: order 'episode' seeds numpy's RandomState with their sum, which takes 0 to "
            f"{_SEEDS - 1}. Take a smaller seed."
        )
    return seed + epoch


def _maxtext_seed(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"olmo-shuffle:{seed}:{epoch}".encode()).digest()[:8], "little")


OLMO = Order(stored_order("olmo", "PCG64", _olmo_seed), epoch_seed=_olmo_seed)
"""Order of OLMo-core's `NumpyFSLDataLoader` (src/olmo_core/data/data_loader.py)."""

MAXTEXT = Order(stored_order("maxtext", "PCG64", _maxtext_seed), host_blocks=True, runs_on=True)
"""Order of MaxText's `OlmoIndexSampler` (olmo_data_grain.py, 0.2.5)."""

EPISODE = Order(stored_order("episode", "RandomState", _episode_seed), epoch_seed=_sum)
"""Order of the episode-indexed loader: `RandomState(seed + epoch).permutation(n)`."""

OPENCHAT = Order(stored_order("openchat", "PCG64", _sum), epoch_seed=_sum)
"""Order of documents in OpenChat (ochat/training_deepspeed/multipack_sampler.py), before it makes batches."""
