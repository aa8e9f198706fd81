"""Measurements of speed; run by `grain-sft bench`, never by tests with a clock.

`BENCHMARKS` has those of made-up corpora, each a function of a folder and a `Scale`; `config` measures a config's pipeline.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grain_sft.errors import PipelineError
from grain_sft.registry import Registry

Figures = Mapping[str, Any]
"""What was measured, ready for JSON."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the made-up corpora, and how long they are measured. Fields have their help text in `SCALE_HELP`."""

    seconds: float = 2.0
    repeats: int = 3
    files: int = 8
    tokens: int = 16_000_000
    sequence_length: int = 8192
    batch_size: int = 8
    startup_files: tuple[int, ...] = (8, 950)
    order_rows: int = 100_000_000
    plan_documents: int = 2_270_000
    conversations: int = 100_000
    documents: int = 100_000


SCALE_HELP = {
    "files": "windows: token files",
    "tokens": "windows: tokens of a file",
    "sequence_length": "windows: tokens of a row",
    "batch_size": "windows: rows of a batch",
    "startup_files": "startup: files of each index",
    "order_rows": "orders: rows of the exact order",
    "plan_documents": "plans: documents, of some 9,000 tokens, as sparse files",
    "conversations": "prepare: conversations, of some 200 tokens",
    "documents": "trace: documents, of some 10,000 tokens, as sparse files; OLMo-3's run has 2,268,468",
}


class Benchmark(NamedTuple):
    """A benchmark of made-up corpora.

    Attributes:
      measure: Returns the figures; files go to a folder that exists.
      lines: Returns the figures as a table.
    """

    measure: Callable[[Path, Scale], Figures]
    lines: Callable[[Figures], Iterator[str]]


BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    PipelineError,
    {
        "windows": "grain_sft.bench.windows:WINDOWS",
        "startup": "grain_sft.bench.processes:STARTUP",
        "orders": "grain_sft.bench.processes:ORDERS",
        "packed": "grain_sft.bench.packed:PACKED",
        "plans": "grain_sft.bench.plans:PLANS",
        "prepare": "grain_sft.bench.prepare:PREPARE",
        "trace": "grain_sft.bench.plans:TRACE",
    },
)
"""Benchmarks by name. The figures of each have names of their own."""
