"""grain_sft: a step number goes in, this host's batch for a TPU comes out, and nothing else decides it."""

from grain_sft import workers
from grain_sft.config import load
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import GrainSftError
from grain_sft.layout import PackedLayout, PaddedLayout, Span, WindowLayout
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host, IndexSampler
from grain_sft.sources import NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets
from grain_sft.version import __version__

workers.default_grain_flags()  # so that worker processes of any grain.DataLoader over an NpyDataSource start

__all__ = [
    "Corpus",
    "GrainSftError",
    "Host",
    "IndexSampler",
    "NgramFilter",
    "NpyDataSource",
    "PackedLayout",
    "PaddedLayout",
    "Pipeline",
    "ShiftTargets",
    "Span",
    "WindowLayout",
    "__version__",
    "load",
    "open_corpus",
]
