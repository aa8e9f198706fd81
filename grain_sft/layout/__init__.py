"""Layout: which spans of which documents make row i?"""

from grain_sft.layout.materialized import MaterializedLayout
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.padded import PaddedLayout
from grain_sft.layout.report import compare_algorithms, packing_report, plan_places
from grain_sft.layout.span import FILL_ROW, FillKey, Layout, Pieces, Span
from grain_sft.layout.windows import WindowLayout

__all__ = [
    "FILL_ROW",
    "FillKey",
    "Layout",
    "MaterializedLayout",
    "PackedLayout",
    "PaddedLayout",
    "Pieces",
    "Span",
    "WindowLayout",
    "compare_algorithms",
    "packing_report",
    "plan_places",
]
