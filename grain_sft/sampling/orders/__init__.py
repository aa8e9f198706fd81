"""Orders: which row is at each index of an epoch. One file per order, and one table of all."""

from grain_sft.errors import SamplerError
from grain_sft.registry import Registry
from grain_sft.sampling.orders.order import Ints, Order, RowsAt

__all__ = ["ORDERS", "Ints", "Order", "RowsAt"]

ORDERS: Registry[Order] = Registry(
    "order",
    SamplerError,
    {
        "shuffle": "grain_sft.sampling.orders.shuffle:SHUFFLE",
        "olmo": "grain_sft.sampling.orders.olmo:OLMO",
        "maxtext": "grain_sft.sampling.orders.maxtext:MAXTEXT",
        "episode": "grain_sft.sampling.orders.episode:EPISODE",
        "openchat": "grain_sft.sampling.orders.openchat:OPENCHAT",
        "random": "grain_sft.sampling.orders.random:RANDOM",
        "sequential": "grain_sft.sampling.orders.sequential:SEQUENTIAL",
    },
    adapt=Order.of,
)
"""Entries are `Order`s, or functions of (seed, epoch, num_rows) that return every row once."""
