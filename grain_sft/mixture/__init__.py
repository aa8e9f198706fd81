"""Mixture: the rows of several sources under one numbering, as a layout and as a data source."""

from grain_sft.mixture.corpus import MixtureCorpus
from grain_sft.mixture.layout import MixtureLayout
from grain_sft.mixture.source import MixtureSource

__all__ = ["MixtureCorpus", "MixtureLayout", "MixtureSource"]
