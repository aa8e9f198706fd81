"""IndexSampler and MixtureSampler: which rows does this host read at step k?"""

from grain_sft.sampling.host import Host
from grain_sft.sampling.mixture import Mixture, SourceOrder
from grain_sft.sampling.mixture_sampler import MixtureSampler
from grain_sft.sampling.sampler import IndexSampler

Sampler = IndexSampler | MixtureSampler

__all__ = ["Host", "IndexSampler", "Mixture", "MixtureSampler", "Sampler", "SourceOrder"]
