"""The table of orders. An order decides which row is at each index of an epoch."""

from collections.abc import Callable

from grain_sft.errors import SamplerError
from grain_sft.registry import Registry
from grain_sft.sampling.orders.order import CacheDir, Costs, Order, RowsAt

__all__ = ["ORDERS", "CacheDir", "Costs", "Order", "RowsAt"]

_HERE = "grain_sft.sampling.orders"
ORDERS: Registry[Order] = Registry(
    "order",
    SamplerError,
    {
        "shuffle": f"{_HERE}.computed:SHUFFLE",
        "olmo": f"{_HERE}.exact:OLMO",
        "maxtext": f"{_HERE}.exact:MAXTEXT",
        "episode": f"{_HERE}.exact:EPISODE",
        "openchat": f"{_HERE}.exact:OPENCHAT",
        "grain": f"{_HERE}.computed:GRAIN",
        "random": f"{_HERE}.computed:RANDOM",
        "sequential": f"{_HERE}.computed:SEQUENTIAL",
        "balanced": f"{_HERE}.balanced:BALANCED",
    },
    adapt=Order.of,
    kinds=(Callable, Order),
)
"""Orders by name. A registered entry may also be a function of (seed, epoch, num_rows) that returns every row once."""
