"""Layout `megatron_gpt`: the rows of Megatron-LM, and of MaxText's file types `mmap` and `mmap_npy`."""

from grain_sft.layout.megatron.blending import blend, normalized
from grain_sft.layout.megatron.gpt import MegatronGptLayout
from grain_sft.layout.megatron.stream import Cut, ends_of, sample_index

__all__ = ["Cut", "MegatronGptLayout", "blend", "ends_of", "normalized", "sample_index"]
