"""Samplers: which rows does this host read at step k?"""

from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.host import Host
from grain_sft.sampling.index_sampler import IndexSampler, LastBatch
from grain_sft.sampling.mixture import Mixture, MixtureLastBatch, MixtureSampler, OnExhausted, Weight
from grain_sft.sampling.orders import ORDERS, Order
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.skips import SkippingSampler, Skips
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder

__all__ = [
    "ORDERS", "BatchSizes", "BatchSlots", "EpochSpan", "EpochStream", "Host", "IndexSampler", "LastBatch", "Mixture",
    "MixtureLastBatch", "MixtureSampler", "OnExhausted", "Order", "Sampler", "SkippingSampler", "Skips", "SourceOrder",
    "Weight",
]  # fmt: skip
