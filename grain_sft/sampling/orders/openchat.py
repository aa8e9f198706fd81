"""Order openchat: that in which OpenChat takes documents, bit for bit."""

from grain_sft.sampling.orders.order import Order
from grain_sft.sampling.orders.stored import Generator, stored_order


def _generator(seed: int, epoch: int) -> Generator:
    """Return `default_rng(seed + epoch)` of ochat/training_deepspeed/multipack_sampler.py, before it makes batches."""
    return "PCG64", seed + epoch


OPENCHAT = Order(stored_order("openchat", _generator), epoch_seed=lambda seed, epoch: seed + epoch)
