"""Packing algorithms: from lengths of documents to rows."""

from __future__ import annotations

from grain_sft.errors import LayoutError
from grain_sft.layout.packing.algorithm import (
    TIES,
    Boundaries,
    Ints,
    LongDocuments,
    PackedRows,
    PackingAlgorithm,
    PackingOptions,
    Ties,
)
from grain_sft.registry import Registry

ALGORITHMS: Registry[PackingAlgorithm] = Registry(
    "algorithm",
    LayoutError,
    {
        "best_fit_decreasing": "grain_sft.layout.packing.best_fit_decreasing:best_fit_decreasing",
        "first_fit_decreasing": "grain_sft.layout.packing.first_fit_decreasing:first_fit_decreasing",
        "multipack": "grain_sft.layout.packing.multipack:MULTIPACK",
        "concat_then_split": "grain_sft.layout.packing.concat_then_split:CONCAT_THEN_SPLIT",
        "shuffled_best_fit": "grain_sft.layout.packing.shuffled_best_fit:SHUFFLED_BEST_FIT",
    },
    adapt=PackingAlgorithm.of,
)
"""Packing algorithms by name. An entry is a `PackingAlgorithm`, or a function of lengths and `PackingOptions`."""

__all__ = [
    "ALGORITHMS",
    "TIES",
    "Boundaries",
    "Ints",
    "LongDocuments",
    "PackedRows",
    "PackingAlgorithm",
    "PackingOptions",
    "Ties",
]
