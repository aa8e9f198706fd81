"""Order maxtext: that of MaxText's `OlmoIndexSampler` (olmo_data_grain.py, 0.2.5), bit for bit."""

import hashlib

from grain_sft.sampling.orders.order import Order
from grain_sft.sampling.orders.stored import Generator, stored_order


def _generator(seed: int, epoch: int) -> Generator:
    digest = hashlib.sha256(f"olmo-shuffle:{seed}:{epoch}".encode()).digest()
    return "PCG64", int.from_bytes(digest[:8], "little")


MAXTEXT = Order(stored_order("maxtext", _generator), host_blocks=True, runs_on=True)
