"""Order olmo: OLMo-core's, bit for bit."""

from grain_sft.sampling.orders.order import Order
from grain_sft.sampling.orders.stored import stored_order


def epoch_seed(seed: int, epoch: int) -> int:
    """Return the seed of `NumpyFSLDataLoader` (src/olmo_core/data/data_loader.py), whose epochs count from 1."""
    return seed + epoch + 1


OLMO = Order(stored_order("olmo", lambda seed, epoch: ("PCG64", epoch_seed(seed, epoch))), epoch_seed=epoch_seed)
