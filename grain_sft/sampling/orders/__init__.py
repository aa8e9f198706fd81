"""Orders: which row is at each index of an epoch. One file per order, and one table of all."""

from grain_sft.errors import SamplerError
from grain_sft.registry import Registry
from grain_sft.sampling.orders.order import CacheDir, Ints, Order, RowsAt

__all__ = ["ORDERS", "CacheDir", "Ints", "Order", "RowsAt"]

_NAMES = ("shuffle", "olmo", "maxtext", "episode", "openchat", "random", "sequential")

ORDERS: Registry[Order] = Registry(
    "order",
    SamplerError,
    {name: f"grain_sft.sampling.orders.{name}:{name.upper()}" for name in _NAMES},
    adapt=Order.of,
)
"""Entries are `Order`s, or functions of (seed, epoch, num_rows) that return every row once."""
