"""Whole processes: their start, their orders at scale, and eight of them that start together."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grain_sft.bench import Benchmark, Figures, Scale
from grain_sft.bench.measuring import line, run_program
from grain_sft.corpus import open_corpus
from grain_sft.errors import PipelineError, StorageError
from grain_sft.storage import CACHE_DIR_VARIABLE, without_interrupts

IMPORT_GRAIN = "import grain"
SHUFFLE_ROWS, SHUFFLE_FILES = 724_000_000, 950  # rows of 8192 tokens in the OLMo-3 pretraining mix
PROCESSES = 8

# --- start-up: seconds from the start of a process to its first batch, beside a process that only imports grain ---

_FIRST_BATCH = """
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 8192))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
batch = next(Pipeline(source, sampler, [NgramFilter(), ShiftTargets()]).iter(start_step=3))
assert batch["inputs"].shape == (8, 8192)
print("{}")
"""


def _measure_startup(folder: Path, scale: Scale) -> Figures:
    """Return the median seconds of processes that run in turn, after one turn that is not counted."""
    programs = {IMPORT_GRAIN: ('import grain; print("{}")', "")}
    for count in scale.startup_files:
        index = folder / f"startup-{count}.json"
        if not index.exists():
            tokens = folder / f"startup-{count}"
            tokens.mkdir(exist_ok=True)
            for number in range(count):
                np.arange(8192, dtype=np.uint32).tofile(tokens / f"{number:04d}.npy")
            open_corpus(tokens, dtype="uint32").save(index)
        programs[f"first batch of a saved index, {count} files"] = (_FIRST_BATCH, str(index))
    turns = [
        {name: run_program(*program)["process_s"] for name, program in programs.items()}
        for _ in range(scale.repeats + 1)
    ]
    return {"startup": {name: statistics.median(turn[name] for turn in turns[1:]) for name in programs}}


def _startup_lines(figures: Figures) -> Iterator[str]:
    medians = figures["startup"]
    yield line("start-up", "s", "on top of import grain", width=24)
    for name, median in medians.items():
        yield line(name, f"{median:.2f}", f"{median - medians[IMPORT_GRAIN]:.2f}", width=24)


STARTUP = Benchmark(_measure_startup, _startup_lines)

# --- orders at scale: the time of a first batch and the memory of a process ---

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


def _measure_orders(folder: Path, scale: Scale) -> Figures:
    rows, name = str(scale.order_rows), f"{scale.order_rows:,} rows"
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        return {
            "orders": {
                f"numpy's own shuffle, {name}": run_program(_NUMPY, rows, cache=cache),
                f"order olmo, first time, {name}": run_program(_EXACT, rows, cache=cache),
                f"order olmo, next time, {name}": run_program(_EXACT, rows, cache=cache),
                f"order shuffle, first batch, {SHUFFLE_ROWS:,} rows": measure_first_batch(Path(cache)),
            }
        }


def measure_first_batch(folder: Path) -> Figures:
    """Return seconds and memory of a process that reads batches of 724 M rows: 24 TB of sparse files, in `folder`."""
    tokens = folder / "sparse"
    tokens.mkdir()
    rows = [SHUFFLE_ROWS // SHUFFLE_FILES + (number < SHUFFLE_ROWS % SHUFFLE_FILES) for number in range(SHUFFLE_FILES)]
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
    return run_program(_SHUFFLE, str(index), cache=str(folder))


def _orders_lines(figures: Figures) -> Iterator[str]:
    yield line("orders", "s", "MB resident", "MB at most")
    for name, row in figures["orders"].items():
        yield line(name, f"{row['seconds']:.2f}", f"{row['mb']:.0f}", f"{row['peak_mb']:.0f}")
        if "step_0_ms" in row:
            yield f"  a step at 0 and at 10,000,000: {row['step_0_ms']:.3f} and {row['step_10m_ms']:.3f} ms"


ORDERS = Benchmark(_measure_orders, _orders_lines)

# --- processes that start together: one of them does for all what is expensive ---

_TOGETHER = """
import os, sys, time
from grain_sft import IndexSampler, NgramFilter, NpyDataSource, PackedLayout, Pipeline, ShiftTargets, open_corpus
print("ready", flush=True)
sys.stdin.readline()
before, begin = os.times(), time.perf_counter()
source = NpyDataSource(PackedLayout(open_corpus(sys.argv[1]), 4096))
sampler = IndexSampler(len(source), global_batch_size=8, seed=0)
batch = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])[0]
wall, after = time.perf_counter() - begin, os.times()
print(wall, sum(after[:4]) - sum(before[:4]), int(batch["inputs"].sum()), flush=True)
"""


def _measure_together(folder: Path, scale: Scale) -> Figures:
    """Return wall and CPU seconds from an index to the first packed batch, without what imports take: of one process and
    of eight, with an empty cache and with a full one; and how many of the eight made the plan."""
    index = folder / f"together-{scale.together_tokens}.json"
    if not index.exists():
        tokens = folder / f"together-{scale.together_tokens}"
        tokens.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        for number in range(8):
            generator.integers(0, 500, scale.together_tokens // 8, dtype=np.uint32).tofile(tokens / f"{number}.npy")
        open_corpus(tokens, dtype="uint32", eos_token_id=0).save(index)
    figures: dict[str, float] = {"processes": PROCESSES}
    batches = set()
    for count in (1, PROCESSES):
        with tempfile.TemporaryDirectory(dir=folder, prefix="together-cache-") as cache:
            for state in ("cold", "warm"):
                found = _run_together(str(index), cache, count)
                batches |= {batch for _, _, batch in found}
                figures[f"{state} {count} wall_s"] = max(wall for wall, _, _ in found)
                figures[f"{state} {count} cpu_s"] = sum(cpu for _, cpu, _ in found)
                if state == "cold" and count > 1:
                    figures["made by"] = sum(cpu > figures["cold 1 cpu_s"] / 2 for _, cpu, _ in found)
    if len(batches) != 1:
        raise PipelineError(f"processes that started together got {len(batches)} different first batches.")
    once = figures[f"cold {PROCESSES} cpu_s"] - figures[f"warm {PROCESSES} cpu_s"]
    figures["once / alone"] = once / (figures["cold 1 cpu_s"] - figures["warm 1 cpu_s"])
    figures["wall / alone"] = figures[f"cold {PROCESSES} wall_s"] / figures["cold 1 wall_s"]
    return {"together": figures}


def _run_together(index: str, cache: str, count: int) -> list[tuple[float, float, int]]:
    """Return wall and CPU seconds and the batch of each of `count` processes that begin when all have imported."""
    environment = {**os.environ, CACHE_DIR_VARIABLE: cache}
    command = [sys.executable, "-c", _TOGETHER, index]
    with without_interrupts():
        processes = [subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    found = []
    for process in processes:
        words = process.communicate()[0].split()
        if process.returncode or len(words) != 3:
            raise PipelineError(f"a process of the benchmark ended with status {process.returncode}.")
        found.append((float(words[0]), float(words[1]), int(words[2])))
    return found


def _together_lines(figures: Figures) -> Iterator[str]:
    found = figures["together"]
    yield line("from index to first packed batch", "wall s", "CPU s, all")
    for count in (1, PROCESSES):
        for state, words in (("cold", "empty cache"), ("warm", "the plan is cached")):
            name = f"{count} process{'es' if count > 1 else ''}, {words}"
            yield line(name, f"{found[f'{state} {count} wall_s']:.2f}", f"{found[f'{state} {count} cpu_s']:.2f}")
    yield (
        f"The plan was made by {found['made by']:.0f} of {PROCESSES}. An empty cache costs all {PROCESSES} "
        f"{found['once / alone']:.2f} x the CPU seconds that it costs one, and {found['wall / alone']:.2f} x the wall seconds "
        f"({os.cpu_count()} cores)."
    )


TOGETHER = Benchmark(_measure_together, _together_lines)
