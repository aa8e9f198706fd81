"""Benchmarks of new processes: the time to the first batch, and the time and memory that orders of many rows take."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import Next, run_program, seconds_in_turn
from grain_sft.corpus import open_corpus
from grain_sft.errors import StorageError

IMPORT_GRAIN = "import grain"  # name in the table of `startup`
SHUFFLE_ROWS = 724_000_000  # rows of 8192 tokens in OLMo-3's pretraining mix
SHUFFLE_FILES = 950  # token files of that mix

# programs of `run_program`, which puts imports and the function `memory` before them
_PIPELINE = """
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
mb_before, begin = memory()["peak_mb"], time.perf_counter()
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 8192))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
pipeline = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])
"""
_FIRST_BATCH = """
assert next(pipeline.iter(start_step=3))["inputs"].shape == (8, 8192)
print("{}")
"""
# `_NUMPY` runs the shuffle that order olmo replays. `_EXACT` runs order olmo, which keeps the shuffled rows in a cached file.
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
    sampler.rows(step)  # the resident memory should not grow with the rows that were read
print(json.dumps({"seconds": seconds, **memory()}))
"""
_SHUFFLE = """
import statistics
from grain_sft.bench.measuring import seconds_waited
next(pipeline.iter())
seconds = time.perf_counter() - begin
def cost(first):
    return statistics.median(seconds_waited(lambda: pipeline[step], 0) for step in range(first, first + 200)) * 1e3
early, late = cost(0), cost(10_000_000)
figures = {"rows": len(source), "seconds": seconds, "step_0_ms": early, "step_10m_ms": late}
print(json.dumps({**figures, "mb_before": mb_before, **memory()}))
"""


def startup(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the seconds that a process takes to make one batch, or only to import Grain."""
    processes: dict[str, Next] = {IMPORT_GRAIN: functools.partial(run_program, 'import grain; print("{}")')}
    for count in dict.fromkeys(scale.startup_files):
        tokens, index = folder / str(count), folder / f"{count}.json"
        tokens.mkdir()
        for number in range(count):
            np.arange(8192, dtype=np.uint32).tofile(tokens / f"{number:04d}.npy")
        open_corpus(tokens, dtype="uint32").save(index)
        first_batch = functools.partial(run_program, _PIPELINE + _FIRST_BATCH, str(index))
        processes[f"first batch of a saved index, {count} files"] = first_batch
    medians = seconds_in_turn(processes, seconds=0, turns=scale.repeats, warm=1)
    rows = {name: {"s": median, "more_s": median - medians[IMPORT_GRAIN]} for name, median in medians.items()}
    yield Table("startup", "start-up", {"s": "{s:.2f}", "on top of import grain": "{more_s:.2f}"}, rows)


def orders(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of orders of many rows: the seconds to the first batch, the memory, and the time of a step."""
    rows = str(scale.order_rows)
    name = f"{scale.order_rows:,} rows"
    columns = {"s": "{seconds:.2f}", "MB resident": "{mb:.0f}", "peak MB": "{peak_mb:.0f}"}
    columns |= {"ms a step": "{step_0_ms:.3f}", "at 10,000,000": "{step_10m_ms:.3f}"}
    figures = {
        f"numpy's own shuffle, {name}": run_program(_NUMPY, rows, cache=str(folder)),
        f"order olmo, first time, {name}": run_program(_EXACT, rows, cache=str(folder)),
        f"order olmo, next time, {name}": run_program(_EXACT, rows, cache=str(folder)),
        f"order shuffle, first batch, {SHUFFLE_ROWS:,} rows": measure_first_batch(folder),
    }
    yield Table("orders", "orders", columns, figures)


def measure_first_batch(folder: Path) -> dict[str, Any]:
    """Return the figures of a process that shuffles `SHUFFLE_ROWS` rows. Their 24 TB of tokens are sparse files in `folder`."""
    tokens = folder / "sparse"
    tokens.mkdir()
    rows_per_file, remainder = divmod(SHUFFLE_ROWS, SHUFFLE_FILES)
    try:
        for number in range(SHUFFLE_FILES):
            rows = rows_per_file + 1 if number < remainder else rows_per_file
            with (tokens / f"{number:04d}.npy").open("wb") as file:
                file.truncate(rows * 8192 * 4)
    except OSError as error:
        reason = f"the file system does not accept sparse files ({error.strerror})"
        raise StorageError(f"{tokens}: {reason}. Set --dir to another disk.") from error
    index = folder / "sparse.json"
    open_corpus(tokens, dtype="uint32").save(index)
    return run_program(_PIPELINE + _SHUFFLE, str(index), cache=str(folder))
