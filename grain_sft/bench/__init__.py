"""Measurements of speed, which `grain-sft bench` runs: of made-up corpora, or of a config. No test depends on a time."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from grain_sft.errors import PipelineError
from grain_sft.registry import Registry

Count = Annotated[int, msgspec.Meta(ge=1)]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the made-up corpora, and length of the measurements.

    Args:
      seconds: Seconds of each measurement.
      repeats: Measurements of each loader, in turn.
      files: Token files (benchmark windows).
      tokens: Tokens of a file (windows).
      sequence_length: Tokens of a row (windows).
      batch_size: Rows of a batch (windows).
      startup_files: Files of each index (startup).
      order_rows: Rows of the exact order (orders).
      samples: Samples of Megatron's indices (megatron).
      plan_documents: Documents, of some 9,000 tokens, as sparse files (plans, withdrawn).
      conversations: Conversations, of some 200 tokens (prepare).
      texts: Plain documents, of some 3,000 bytes (prepare).
      documents: Documents, of some 10,000 tokens, as sparse files (trace); OLMo-3's run has 2,268,468.
    """

    seconds: float = 2.0
    repeats: Count = 3
    files: Count = 8
    tokens: Count = 16_000_000
    sequence_length: Count = 8192
    batch_size: Count = 8
    startup_files: tuple[Count, ...] = (8, 950)
    order_rows: Count = 100_000_000
    samples: Count = 10_000_000
    plan_documents: Count = 2_270_000
    conversations: Count = 100_000
    texts: Count = 8_000
    documents: Count = 100_000


class Table(NamedTuple):
    """Figures of a benchmark, by name.

    Attributes:
      key: Unique name of the table in the JSON.
      title: First heading.
      columns: Format of each other column, by heading: `{"s": "{seconds:.2f}"}`.
      rows: Figures, by name. Where a row lacks what a column shows, the cell is empty.
    """

    key: str
    title: str
    columns: Mapping[str, str]
    rows: Mapping[str, Mapping[str, Any]]

    def lines(self) -> Iterator[str]:
        """Yield the headings, then a line for each row."""
        cells = [[self.title, *self.columns]]
        for name, row in self.rows.items():
            cells.append([name, *(_shown(template, row) for template in self.columns.values())])
        name_width, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        for name, *others in cells:
            padded = (f"{cell:>{width + 2}}" for cell, width in zip(others, widths, strict=True))
            yield name.ljust(name_width) + "".join(padded)


def _shown(template: str, row: Mapping[str, Any]) -> str:
    try:
        return template.format_map(row)
    except KeyError:
        return ""


Benchmark = Callable[[Path, Scale], Iterable[Table]]
"""Function that writes made-up corpora to an existing folder, and measures them."""

BENCHMARKS: Registry[Benchmark] = Registry(
    "benchmark",
    PipelineError,
    {
        "windows": "grain_sft.bench.loaders:windows",
        "startup": "grain_sft.bench.processes:startup",
        "orders": "grain_sft.bench.processes:orders",
        "packed": "grain_sft.bench.loaders:packed",
        "plans": "grain_sft.bench.plans:plans",
        "megatron": "grain_sft.bench.megatron:megatron",
        "prepare": "grain_sft.bench.preparing:preparing",
        "trace": "grain_sft.bench.plans:traces",
        "withdrawn": "grain_sft.bench.withdrawn:withdrawn",
    },
)
"""Benchmarks by name."""
