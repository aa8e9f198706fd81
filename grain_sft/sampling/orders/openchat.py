"""Order openchat: that in which OpenChat takes documents, bit for bit."""

from grain_sft.sampling.orders.order import Order
from grain_sft.sampling.orders.stored import stored_order


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of `default_rng` in ochat/training_deepspeed/multipack_sampler.py, before it makes batches."""
    return seed + epoch


OPENCHAT = Order(
    stored_order("openchat", lambda seed, epoch: ("PCG64", epoch_seed(seed, epoch))), epoch_seed=epoch_seed
)
