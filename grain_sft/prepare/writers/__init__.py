"""Writers: formats of corpora on disk, by name."""

from grain_sft.prepare.writers import episodes, olmo, openchat, primer
from grain_sft.prepare.writers.plan import Format, Plan, SplitStatistics, Task

FORMATS: dict[str, Format] = {
    "olmo": olmo.FORMAT,
    "episodes": episodes.FORMAT,
    "primer": primer.FORMAT,
    "openchat": openchat.FORMAT,
}

__all__ = ["FORMATS", "Format", "Plan", "SplitStatistics", "Task"]
