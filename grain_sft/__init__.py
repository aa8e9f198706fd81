"""Input pipeline for language models in JAX. The step number alone decides the batch."""

from typing import TYPE_CHECKING, Any

from grain_sft import deprecated
from grain_sft.errors import GrainSftError
from grain_sft.version import __version__

deprecated.install()  # makes modules importable by their former paths

if TYPE_CHECKING:
    from grain_sft.config import load
    from grain_sft.corpus import Corpus, open_corpus
    from grain_sft.layout import PackedLayout, PaddedLayout, Span, WindowLayout
    from grain_sft.pipeline import Pipeline
    from grain_sft.sampling import Host, IndexSampler
    from grain_sft.source import NpyDataSource
    from grain_sft.transforms import NgramFilter, ShiftTargets

_PLACES = {  # public names, by the module that defines them
    "config": ("load",),
    "corpus": ("Corpus", "open_corpus"),
    "layout": ("PackedLayout", "PaddedLayout", "Span", "WindowLayout"),
    "pipeline": ("Pipeline",),
    "sampling": ("Host", "IndexSampler"),
    "source": ("NpyDataSource",),
    "transforms": ("NgramFilter", "ShiftTargets"),
}
# modules that `dir()` lists besides the public names
_PACKAGES = (*_PLACES, "errors", "integrations", "observers", "prepare", "provenance", "replay", "storage")
_PACKAGES += ("verify", "view")

__all__ = ["Corpus", "GrainSftError", "Host", "IndexSampler", "NgramFilter", "NpyDataSource", "PackedLayout"]
__all__ += ["PaddedLayout", "Pipeline", "ShiftTargets", "Span", "WindowLayout", "__version__", "load", "open_corpus"]


def __getattr__(name: str) -> Any:
    """Import a public name, or any submodule, on first access.

    Grain and JAX take seconds to import, and few commands need them.
    """
    import importlib.util

    for module, names in _PLACES.items():
        if name in names:
            found = getattr(importlib.import_module(f"grain_sft.{module}"), name)
            globals()[name] = found
            return found
    if not name.startswith("_") and importlib.util.find_spec(f"grain_sft.{name}") is not None:
        return importlib.import_module(f"grain_sft.{name}")
    raise AttributeError(f"module 'grain_sft' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
