"""Transforms: grain `Map`s from the source's dict to a trainer's batch, for rows [L] and batches [rows, L] alike."""

from grain_sft.transforms.drop_last_position import DropLastPosition
from grain_sft.transforms.ngram_filter import NgramFilter
from grain_sft.transforms.shift_targets import ShiftTargets
from grain_sft.transforms.trim import TrimToMultiple

__all__ = ["DropLastPosition", "NgramFilter", "ShiftTargets", "TrimToMultiple"]
