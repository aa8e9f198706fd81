"""Layout: which spans of which documents make row i?"""

from collections.abc import Callable

from grain_sft.errors import LayoutError
from grain_sft.layout.layout import RECEIPT_VERSION, Layout, LeftOut, digest, sources_of
from grain_sft.layout.materialized import MaterializedLayout
from grain_sft.layout.megatron_blend import Blend, blend, normalized
from grain_sft.layout.megatron_gpt import MegatronGptLayout
from grain_sft.layout.megatron_stream import Cut, ends_of, sample_index
from grain_sft.layout.mixture import MixtureLayout
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS, TIES, PackedRows, PackingAlgorithm, PackingOptions
from grain_sft.layout.padded import PaddedLayout
from grain_sft.layout.pairs import PairsLayout
from grain_sft.layout.pieces import FILL_ROW, FillKey, Pieces, Span, checked_record, checked_rows, ragged
from grain_sft.layout.plan import COUNTS, check_columns, plan_columns
from grain_sft.layout.report import (
    algorithm_title,
    compare_algorithms,
    packing_report,
    padding_share,
    plan_files,
    plan_places,
)
from grain_sft.layout.windows import WindowLayout
from grain_sft.registry import Registry

LAYOUTS: Registry[Callable[..., Layout]] = Registry(
    "layout kind",
    LayoutError,
    {
        "windows": WindowLayout,
        "padded": PaddedLayout,
        "packed": PackedLayout,
        "pairs": PairsLayout,
        "materialized": MaterializedLayout,
        "megatron_gpt": MegatronGptLayout,
    },
)
"""Layouts by their kind in a config. The arguments of the constructor behind `corpus` are the options of the layout."""

__all__ = [
    "ALGORITHMS", "COUNTS", "FILL_ROW", "LAYOUTS", "RECEIPT_VERSION", "TIES", "Blend", "Cut", "FillKey", "Layout",
    "LeftOut", "MaterializedLayout", "MegatronGptLayout", "MixtureLayout", "PackedLayout", "PackedRows", "PackingAlgorithm",
    "PackingOptions", "PaddedLayout", "PairsLayout", "Pieces", "Span", "WindowLayout", "algorithm_title", "blend",
    "check_columns", "checked_record", "checked_rows", "compare_algorithms", "digest", "ends_of", "normalized",
    "packing_report", "padding_share", "plan_columns", "plan_files", "plan_places", "ragged", "sample_index",
    "sources_of",
]  # fmt: skip
