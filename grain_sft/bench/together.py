"""Processes of one machine that start together: what is expensive is done by one of them, for all."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from grain_sft.corpus import open_corpus
from grain_sft.errors import PipelineError
from grain_sft.storage import without_interrupts

PROCESSES = 8

_PROGRAM = """
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


def measure(folder: Path, tokens: int) -> dict[str, float]:
    """Seconds from an index of `tokens` tokens to the first packed batch, without what imports take: of one process and
    of eight, with an empty cache and with a full one; and how many of the eight made the plan."""
    index = _index(folder, tokens)
    figures: dict[str, float] = {"processes": PROCESSES}
    batches = set()
    for count in (1, PROCESSES):
        with tempfile.TemporaryDirectory(dir=folder, prefix="together-cache-") as cache:
            for state in ("cold", "warm"):
                found = _run(index, cache, count)
                batches |= {batch for _, _, batch in found}
                figures[f"{state} {count} wall_s"] = max(wall for wall, _, _ in found)
                figures[f"{state} {count} cpu_s"] = sum(cpu for _, cpu, _ in found)
                if state == "cold" and count > 1:
                    figures["made by"] = sum(cpu > figures["cold 1 cpu_s"] / 2 for _, cpu, _ in found)
    if len(batches) != 1:
        raise PipelineError(f"processes that started together got {len(batches)} different first batches.")
    return figures


def report(figures: dict[str, float]) -> dict[str, float]:
    """Print the figures, and what eight cost beside one; returns them."""
    count = int(figures["processes"])
    print(f"\n{'from index to first packed batch':44}{'wall s':>9}{'CPU s, all':>13}")
    for number in (1, count):
        for state, words in (("cold", "empty cache"), ("warm", "the plan is there")):
            name = f"{number} process{'es' if number > 1 else ''}, {words}"
            print(f"{name:44}{figures[f'{state} {number} wall_s']:9.2f}{figures[f'{state} {number} cpu_s']:13.2f}")
    once = figures[f"cold {count} cpu_s"] - figures[f"warm {count} cpu_s"]
    alone = figures["cold 1 cpu_s"] - figures["warm 1 cpu_s"]
    figures |= {
        "once / alone": once / alone,
        "wall / alone": figures[f"cold {count} wall_s"] / figures["cold 1 wall_s"],
    }
    print(
        f"The plan was made by {figures['made by']:.0f} of {count}. What an empty cache costs all {count} in CPU is "
        f"{figures['once / alone']:.2f} x what it costs one; in wall time {figures['wall / alone']:.2f} x "
        f"({os.cpu_count()} cores)."
    )
    return figures


def _run(index: str, cache: str, count: int) -> list[tuple[float, float, int]]:
    """Wall and CPU seconds and the batch of each of `count` processes that begin when all have imported."""
    environment = {**os.environ, "GRAIN_SFT_CACHE_DIR": cache}
    command = [sys.executable, "-c", _PROGRAM, index]
    with without_interrupts():
        processes = [subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True) for _ in range(count)]
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    found = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    for process in processes:
        said = process.communicate()[0].split()
        if process.returncode or len(said) != 3:
            raise PipelineError(f"a process that was started for a measurement ended with status {process.returncode}.")
        found.append((float(said[0]), float(said[1]), int(said[2])))
    return found


def _index(folder: Path, tokens: int) -> str:
    """The saved index of documents of some 500 tokens that end at EOS, made where it is missing."""
    index = folder / f"together-{tokens}.json"
    if not index.exists():
        target = folder / f"together-{tokens}"
        target.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        for number in range(8):
            generator.integers(0, 500, tokens // 8, dtype=np.uint32).tofile(target / f"{number}.npy")
        open_corpus(target, dtype="uint32", eos_token_id=0).save(index)
    return str(index)
