"""Sources, which read the arrays of rows: tokens, loss mask, segment ids and positions of row i, or of rows i, j, k."""

from grain_sft.source.arrays import Arrays, Element, ReadRows
from grain_sft.source.mixture import MixtureSource
from grain_sft.source.npy import NpyDataSource, RowSource
from grain_sft.source.withdrawn import Withdrawals

__all__ = ["Arrays", "Element", "MixtureSource", "NpyDataSource", "ReadRows", "RowSource", "Withdrawals"]
