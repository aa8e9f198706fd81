"""IndexSampler: which rows does this host read at step k?"""

from grain_sft.sampling.host import Host
from grain_sft.sampling.sampler import IndexSampler

__all__ = ["Host", "IndexSampler"]
