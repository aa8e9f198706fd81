"""Writers of prepared corpora."""

from grain_sft.errors import PrepareError
from grain_sft.prepare.writers.plan import Format, Plan, SplitStatistics, Task
from grain_sft.registry import Registry

__all__ = ["FORMATS", "Format", "Plan", "SplitStatistics", "Task"]

_NAMES = ("olmo", "episodes", "primer", "openchat", "pairs", "megatron")
_ENTRIES = {name: f"grain_sft.prepare.writers.{name}:FORMAT" for name in _NAMES}

FORMATS: Registry[Format] = Registry("format", PrepareError, _ENTRIES, kinds=(Format,))
"""Formats that `prepare` and `convert` write."""
