"""Packing algorithms, by name: from lengths of documents to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from grain_sft.layout.packing.best_fit_decreasing import best_fit_decreasing
from grain_sft.layout.packing.concat_then_split import concat_then_split
from grain_sft.layout.packing.first_fit_decreasing import first_fit_decreasing
from grain_sft.layout.packing.multipack import multipack
from grain_sft.layout.packing.rows import TIES, Ints, PackOptions, Rows
from grain_sft.layout.packing.shuffled_best_fit import shuffled_best_fit

Algorithm = Callable[[Ints, int, PackOptions], Rows]

ALGORITHMS: Mapping[str, Algorithm] = {
    "best_fit_decreasing": best_fit_decreasing,
    "first_fit_decreasing": first_fit_decreasing,
    "multipack": multipack,
    "concat_then_split": concat_then_split,
    "shuffled_best_fit": shuffled_best_fit,
}

BY_EPOCH = ("multipack", "shuffled_best_fit")
"""Algorithms that pack each epoch anew."""

__all__ = ["ALGORITHMS", "BY_EPOCH", "TIES", "Algorithm", "Ints", "PackOptions", "Rows"]
