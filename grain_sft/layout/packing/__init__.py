"""Packing algorithms. An algorithm chooses the documents that share a row, from the lengths of all documents."""

from grain_sft.errors import LayoutError
from grain_sft.layout.packing.algorithm import (
    Boundaries,
    LongDocuments,
    PackedRows,
    PackingAlgorithm,
    PackingOptions,
    Ties,
    join_rows,
)
from grain_sft.registry import Registry

_HERE = "grain_sft.layout.packing"
ALGORITHMS: Registry[PackingAlgorithm] = Registry(
    "algorithm",
    LayoutError,
    {
        "best_fit_decreasing": f"{_HERE}.best_fit_decreasing:best_fit_decreasing",
        "first_fit_decreasing": f"{_HERE}.first_fit_decreasing:first_fit_decreasing",
        "multipack": f"{_HERE}.multipack:MULTIPACK",
        "concat_then_split": f"{_HERE}.concat_then_split:CONCAT_THEN_SPLIT",
        "balanced": f"{_HERE}.balanced:BALANCED",
        "shuffled_best_fit": f"{_HERE}.shuffled_best_fit:SHUFFLED_BEST_FIT",
    },
    adapt=PackingAlgorithm.of,
)
"""Packing algorithms by name. An entry is a `PackingAlgorithm`, or a function of lengths and `PackingOptions`."""

__all__ = ["ALGORITHMS", "Boundaries", "LongDocuments", "PackedRows", "PackingAlgorithm", "PackingOptions", "Ties", "join_rows"]
