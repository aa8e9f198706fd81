"""Layouts. A layout decides which spans of which documents make each row."""

from collections.abc import Callable

from grain_sft.errors import LayoutError
from grain_sft.layout.checked_pieces import check_layout, check_repeated, checked_pieces
from grain_sft.layout.columns import ColumnsLayout
from grain_sft.layout.layout import RECEIPT_VERSION, Layout, digest
from grain_sft.layout.materialized import MaterializedLayout
from grain_sft.layout.megatron import Cut, MegatronGptLayout, blend, ends_of, normalized, sample_index
from grain_sft.layout.mixture import MixtureLayout
from grain_sft.layout.named import (
    ListFile,
    corpus_documents_named,
    documents_named_in,
    documents_of_record,
    numbers_in,
    run_documents_named,
)
from grain_sft.layout.olmo_vsl import OlmoVslLayout
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS, PackedRows, PackingAlgorithm, PackingOptions
from grain_sft.layout.padded import PaddedLayout
from grain_sft.layout.pairs import PairsLayout
from grain_sft.layout.pieces import LeftOut, Pieces, Span, expand_counts, groups
from grain_sft.layout.plan import COUNTS, check_columns, plan_columns
from grain_sft.layout.report import (
    ROWS_A_DEVICE,
    algorithm_title,
    compare_algorithms,
    over_devices,
    packing_report,
    plan_files,
    plan_places,
)
from grain_sft.layout.row_numbers import FILL_ROW, FillKey, checked_record, checked_rows
from grain_sft.layout.run_documents import RunDocuments, split_documents
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
        "olmo_vsl": OlmoVslLayout,
    },
    base=Layout,
)
"""Layouts by their kind in a config. The constructor's arguments after `corpus` are the options of the layout."""

__all__ = [
    "ALGORITHMS", "COUNTS", "FILL_ROW", "LAYOUTS", "RECEIPT_VERSION", "ROWS_A_DEVICE", "ColumnsLayout", "Cut", "FillKey",
    "Layout", "LeftOut", "ListFile", "MaterializedLayout", "MegatronGptLayout", "MixtureLayout", "OlmoVslLayout",
    "PackedLayout", "PackedRows", "PackingAlgorithm", "PackingOptions", "PaddedLayout", "PairsLayout", "Pieces", "RunDocuments",
    "Span", "WindowLayout", "algorithm_title", "blend", "check_columns", "check_layout", "check_repeated", "checked_pieces",
    "checked_record", "checked_rows", "compare_algorithms", "corpus_documents_named", "digest", "documents_named_in",
    "documents_of_record", "ends_of", "expand_counts", "groups", "normalized", "numbers_in", "over_devices", "packing_report",
    "plan_columns", "plan_files", "plan_places", "run_documents_named", "sample_index", "split_documents",
]  # fmt: skip
