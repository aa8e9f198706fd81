"""Orders: which row is at each index of an epoch."""

from grain_sft.errors import SamplerError
from grain_sft.registry import Registry
from grain_sft.sampling.orders.order import CacheDir, Costs, Ints, Order, RowsAt

__all__ = ["ORDERS", "CacheDir", "Costs", "Ints", "Order", "RowsAt"]

_FILES = {"shuffle": "computed", "olmo": "exact", "maxtext": "exact", "episode": "exact", "openchat": "exact"}
_FILES |= {"grain": "computed", "random": "computed", "sequential": "computed", "balanced": "balanced"}

ORDERS: Registry[Order] = Registry(
    "order",
    SamplerError,
    {name: f"grain_sft.sampling.orders.{file}:{name.upper()}" for name, file in _FILES.items()},
    adapt=Order.of,
)
"""Entries are `Order`s, or functions of (seed, epoch, num_rows) that return every row once."""
