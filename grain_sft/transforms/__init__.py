"""Transforms: Grain `Map`s that turn a source's arrays, [L] for a row or [rows, L] for a batch, into a trainer's batch."""

import grain

from grain_sft.errors import TransformError
from grain_sft.registry import Registry
from grain_sft.transforms.drop_last_position import DropLastPosition
from grain_sft.transforms.element import check_maps, column_reach, trait
from grain_sft.transforms.mask_eod import MaskEod
from grain_sft.transforms.ngram_filter import NgramFilter
from grain_sft.transforms.reset_at_eod import ResetAtEod
from grain_sft.transforms.shift_targets import ShiftTargets, reader_of
from grain_sft.transforms.split_pairs import SplitPairs
from grain_sft.transforms.trim import TrimToMultiple

TRANSFORMS: Registry[type[grain.transforms.Map]] = Registry(
    "transform",
    TransformError,
    {
        "ngram_filter": NgramFilter,
        "shift_targets": ShiftTargets,
        "split_pairs": SplitPairs,
        "trim_to_multiple": TrimToMultiple,
        "drop_last_position": DropLastPosition,
        "mask_eod": MaskEod,
        "reset_at_eod": ResetAtEod,
    },
    base=grain.transforms.Map,
)
"""Transforms by their name in a config. The constructor's arguments are the options of the transform.

A transform may have attributes that describe it: see `trait` and `column_reach`. A run logs a warning if no target in its first
batches takes loss. If a transform took the loss off, the warning quotes its attribute `no_loss_reason`, if it exists.
"""

__all__ = [
    "TRANSFORMS", "DropLastPosition", "MaskEod", "NgramFilter", "ResetAtEod", "ShiftTargets", "SplitPairs",
    "TrimToMultiple", "check_maps", "column_reach", "reader_of", "trait",
]  # fmt: skip
