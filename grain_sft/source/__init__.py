"""Source: the arrays of row i, or of rows i, j, k."""

from grain_sft.source.arrays import Element
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, ReadRows

__all__ = ["Element", "MixtureSource", "NpyDataSource", "ReadRows"]
