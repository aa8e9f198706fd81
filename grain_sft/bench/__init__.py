"""The benchmarks of `grain-sft bench`, the sizes of their corpora, and their tables."""

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
    """Sizes of the made-up corpora, and lengths of the measurements.

    Args:
      seconds: Seconds of each measurement.
      repeats: Number of measurements of each loader.
      files: Number of token files in benchmark windows.
      tokens: Number of tokens in each token file of benchmark windows.
      sequence_length: Number of tokens in a row of benchmark windows.
      batch_size: Number of rows in a batch of benchmark windows.
      startup_files: Number of token files of each corpus of benchmark startup.
      order_rows: Number of rows in benchmark orders.
      samples: Number of samples in benchmark megatron.
      plan_documents: Number of documents in benchmark plans, and in each corpus of benchmark withdrawn.
      conversations: Number of conversations in benchmark prepare. Each has about 200 tokens.
      texts: Number of plain documents in benchmark prepare. Each has about 3,000 bytes.
      documents: Number of documents in benchmark trace. Each has about 10,000 tokens.
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
    """Figures of a benchmark. Each row has the figures of one measured program or loader."""

    key: str  # name in the JSON
    title: str  # heading of the column of the rows' names
    columns: Mapping[str, str]  # formats by heading: `{"s": "{seconds:.2f}"}` prints the figure `seconds`
    rows: Mapping[str, Mapping[str, Any]]  # figures of each row, by the row's name

    def lines(self) -> Iterator[str]:
        """Yield the heading and the rows as aligned text."""
        cells = [[self.title, *self.columns]]
        for name, row in self.rows.items():
            cells.append([name, *(_shown(template, row) for template in self.columns.values())])
        name_width, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        for name, *others in cells:
            padded = (f"{cell:>{width + 2}}" for cell, width in zip(others, widths, strict=True))
            yield name.ljust(name_width) + "".join(padded)


def _shown(template: str, row: Mapping[str, Any]) -> str:
    """Return the text of a cell: `template` with the figures of `row`, or "" if the row lacks a figure."""
    try:
        return template.format_map(row)
    except KeyError:
        return ""


Benchmark = Callable[[Path, Scale], Iterable[Table]]
"""Function that writes made-up corpora to an empty folder, measures, and yields tables of the figures."""

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
        "withdrawn": "grain_sft.bench.loaders:withdrawn",
    },
)
