"""Source: the arrays of row i, or of rows i, j, k."""

from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource

__all__ = ["Arrays", "Element", "MixtureSource", "NpyDataSource", "ReadRows"]
