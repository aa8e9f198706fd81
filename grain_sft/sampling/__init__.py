"""Samplers: which rows does this host read at step k?"""

from grain_sft.sampling.batch_sizes import BatchSizes
from grain_sft.sampling.curricula import Curriculum
from grain_sft.sampling.curriculum_sampler import CurriculumSampler
from grain_sft.sampling.host import Host
from grain_sft.sampling.index_sampler import IndexSampler, LastBatch
from grain_sft.sampling.mixture import Mixture, Weight
from grain_sft.sampling.mixture_sampler import MixtureLastBatch, MixtureSampler
from grain_sft.sampling.orders import ORDERS, Order
from grain_sft.sampling.proportions import OnExhausted
from grain_sft.sampling.sampler import Sampler
from grain_sft.sampling.staged import StagedSampler
from grain_sft.sampling.step_map import MappedSampler, StepMap
from grain_sft.sampling.streams import BatchSlots, EpochSpan, EpochStream, SourceOrder

__all__ = [
    "ORDERS", "BatchSizes", "BatchSlots", "Curriculum", "CurriculumSampler", "EpochSpan", "EpochStream", "Host",
    "IndexSampler", "LastBatch", "MappedSampler", "Mixture", "MixtureLastBatch", "MixtureSampler", "OnExhausted", "Order",
    "Sampler", "SourceOrder", "StagedSampler", "StepMap", "Weight",
]  # fmt: skip
