"""Orders at scale: the time of a first batch and the memory of a process, each measured in a process of its own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from grain_sft.bench import own_process
from grain_sft.errors import StorageError

SHUFFLE_ROWS = 724_000_000  # rows of 8192 tokens in the OLMo-3 pretraining mix
FILES = 950

_NUMPY = """
import numpy as np
begin = time.perf_counter()
rows = np.arange(int(sys.argv[1]), dtype=np.uint32)
np.random.Generator(np.random.PCG64(1)).shuffle(rows)
print(json.dumps({"seconds": time.perf_counter() - begin, **memory()}))
"""

_EXACT = """
from grain_sft import IndexSampler
begin = time.perf_counter()
sampler = IndexSampler(int(sys.argv[1]), global_batch_size=512, seed=0, order="olmo")
sampler.rows(0)
seconds = time.perf_counter() - begin
for step in range(0, sampler.steps_per_epoch, max(1, sampler.steps_per_epoch // 1000)):
    sampler.rows(step)
print(json.dumps({"seconds": seconds, **memory()}))
"""

_SHUFFLE = """
import statistics
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
begin = time.perf_counter()
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 8192))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
pipeline = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])
next(pipeline.iter())
seconds = time.perf_counter() - begin
def cost(first):
    times = []
    for step in range(first, first + 200):
        begin = time.perf_counter()
        pipeline[step]
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3
early, late = cost(0), cost(10_000_000)
print(json.dumps({"rows": len(source), "seconds": seconds, "step_0_ms": early, "step_10m_ms": late, **memory()}))
"""


def measure(folder: Path, rows: int) -> dict[str, dict[str, float]]:
    """Figures of each process, by name."""
    figures = {}
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        name = f"{rows:,} rows"
        figures[f"numpy's own shuffle, {name}"] = own_process.run(_NUMPY, str(rows), cache)
        figures[f"order olmo, first time, {name}"] = own_process.run(_EXACT, str(rows), cache)
        figures[f"order olmo, next time, {name}"] = own_process.run(_EXACT, str(rows), cache)
        figures[f"order shuffle, first batch, {SHUFFLE_ROWS:,} rows"] = first_batch(Path(cache))
    return figures


def first_batch(folder: Path) -> dict[str, float]:
    """A process that reads batches of 724 M rows, which `folder` gets as sparse files: its seconds and memory."""
    return own_process.run(_SHUFFLE, _sparse_index(folder), str(folder))


def report(figures: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Print the table; returns the figures."""
    print(f"\n{'':54}{'s':>9}{'MB resident':>14}{'MB at most':>13}")
    for name, row in figures.items():
        print(f"{name:54}{row['seconds']:9.2f}{row['mb']:14.0f}{row['peak_mb']:13.0f}")
        if "step_0_ms" in row:
            print(f"  a step at 0 and at 10,000,000: {row['step_0_ms']:.3f} and {row['step_10m_ms']:.3f} ms")
    return figures


def _sparse_index(folder: Path) -> str:
    """The index of 950 files with 724 M rows of 8192 uint32 tokens, all holes: 24 TB that take no space."""
    from grain_sft.corpus import open_corpus

    tokens = folder / "sparse"
    tokens.mkdir()
    rows = [SHUFFLE_ROWS // FILES + (number < SHUFFLE_ROWS % FILES) for number in range(FILES)]
    try:
        for number, count in enumerate(rows):
            with (tokens / f"{number:04d}.npy").open("wb") as file:
                file.truncate(count * 8192 * 4)
    except OSError as error:
        raise StorageError(
            f"{tokens}: the file system takes no sparse files ({error.strerror}). Give --dir."
        ) from error
    index = folder / "sparse.json"
    open_corpus(tokens, dtype="uint32").save(index)
    return str(index)
