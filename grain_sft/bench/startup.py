"""Seconds from the start of a process to its first batch, beside the start of a process that only imports grain."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from grain_sft.corpus import open_corpus
from grain_sft.errors import PipelineError

IMPORT_GRAIN = "import grain"

_FIRST_BATCH = """
import sys
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 8192))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
batch = next(Pipeline(source, sampler, [NgramFilter(), ShiftTargets()]).iter(start_step=3))
assert batch["inputs"].shape == (8, 8192)
"""


def measure(folder: Path, file_counts: Sequence[int], repeats: int) -> dict[str, list[float]]:
    """Seconds of whole processes, in turn, after one that is not counted."""
    programs: dict[str, list[str]] = {IMPORT_GRAIN: ["-c", "import grain"]}
    for count in file_counts:
        programs[f"first batch of a saved index, {count} files"] = ["-c", _FIRST_BATCH, _index(folder, count)]
    figures: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, arguments in programs.items():
            begin = time.perf_counter()
            result = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
            if result.returncode:
                reason = result.stderr.strip().rpartition("\n")[2]
                raise PipelineError(f"{name}: the process ended with status {result.returncode}: {reason}")
            if turn:
                figures[name].append(time.perf_counter() - begin)
    return figures


def report(figures: dict[str, list[float]]) -> dict[str, float]:
    """Print the medians, and what they come to on top of importing grain; returns them in seconds."""
    medians = {name: statistics.median(times) for name, times in figures.items()}
    print(f"\n{'':44}{'s':>9}{'on top of import grain':>26}")
    for name, median in medians.items():
        print(f"{name:44}{median:9.2f}{median - medians[IMPORT_GRAIN]:26.2f}")
    return medians


def _index(folder: Path, count: int) -> str:
    """The saved index of `count` small files, made where it is missing."""
    index = folder / f"startup-{count}.json"
    if not index.exists():
        tokens = folder / f"startup-{count}"
        tokens.mkdir(parents=True, exist_ok=True)
        for number in range(count):
            np.arange(8192, dtype=np.uint32).tofile(tokens / f"{number:04d}.npy")
        open_corpus(tokens, dtype="uint32").save(index)
    return str(index)
