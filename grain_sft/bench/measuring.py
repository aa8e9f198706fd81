"""Tools of the benchmarks: timers, the speed limit of loaders, and programs in a subprocess."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.child_environment import child_environment, run_python
from grain_sft.storage import CACHE_DIR_VARIABLE

Next = Callable[[], Any]
"""Function that makes the next batch of a loader, or does the work that is measured in its place."""

LIMIT = "limit: numpy, contiguous rows"  # label of `limit` in tables
SEED = 34521
TURNS = 8  # turns of each loader in a measurement
SPEED = {"Mtok/s": "{mtok_per_s:.1f}", "ms/batch": "{ms_per_batch:.3f}", "of limit": "{of_limit:.2f}"}
"""Columns of a `Table` whose rows have the figures of `rate`."""

_MAX_BYTES, _MAX_ROWS = 1 << 27, 4096  # maximum size of the memory that `limit` copies from; one batch may exceed it

_PREAMBLE = """
import json, os, sys, time
def memory():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {key: int(fields[name].split()[0]) * 1024 / 1e6 for key, name in (("mb", "VmRSS"), ("peak_mb", "VmHWM"))}
"""


def limit(batch: Mapping[str, npt.NDArray[Any]]) -> Next:
    """Return a function that copies rows, one by one, from memory into arrays of the batch's shapes. No loader can be faster.

    Consecutive calls copy from different rows of memory, if there are enough rows for two batches. All calls copy
    to the same arrays, because allocation would take most of the time. An array under two keys is copied once.
    """
    arrays = list({id(array): array for array in batch.values() if np.ndim(array)}.values())
    count = len(arrays[0])
    longest = max(array[0].nbytes for array in arrays)
    memory = np.ones((max(count, min(_MAX_ROWS, _MAX_BYTES // longest)), longest), np.uint8)
    # each array's rows, as views of the same memory
    sources = [memory[:, : array[0].nbytes].view(array.dtype) for array in arrays]
    copies = [np.empty((count, array[0].size), array.dtype) for array in arrays]
    starts = itertools.cycle(range(0, len(memory) - count + 1, count))

    def copy() -> list[npt.NDArray[Any]]:
        start = next(starts)
        for source, to in zip(sources, copies, strict=True):
            for row in range(count):
                to[row] = source[start + row]
        return copies

    return copy


def seconds_a_batch(next_batch: Next, seconds: float) -> float:
    """Make batches until `seconds` have passed, but at least one. Return the mean seconds per batch."""
    begin = time.perf_counter()
    elapsed, count = 0.0, 0
    while not count or elapsed < seconds:
        next_batch()
        count += 1
        elapsed = time.perf_counter() - begin
    return elapsed / count


def seconds_in_turn(loaders: Mapping[str, Next], seconds: float, turns: int, warm: int) -> dict[str, float]:
    """Return the seconds per batch of each loader: the median of its turns.

    Each loader first makes `warm` batches. Then each has `turns` turns of `seconds`. The loaders alternate, so that other work
    on the machine slows all of them.
    """
    for next_batch in loaders.values():
        for _ in range(warm):
            next_batch()
    by_turn = [[seconds_a_batch(next_batch, seconds) for next_batch in loaders.values()] for _ in range(turns)]
    return dict(zip(loaders, map(statistics.median, zip(*by_turn, strict=True)), strict=True))


def seconds_waited(next_batch: Next, step_seconds: float) -> float:
    """Return the seconds that a trainer waits for the next batch if its step takes `step_seconds`."""
    time.sleep(step_seconds)
    begin = time.perf_counter()
    next_batch()
    return time.perf_counter() - begin


def rate(tokens: float, seconds: float, limit_seconds: float) -> dict[str, float]:
    """Return the figures of a loader whose batch of `tokens` takes `seconds`."""
    return {"mtok_per_s": tokens / 1e6 / seconds, "ms_per_batch": seconds * 1e3, "of_limit": limit_seconds / seconds}


def run_program(program: str, *arguments: str, cache: str | None = None) -> dict[str, Any]:
    """Run a Python program in a subprocess. Return the JSON object that it prints last, with its run time in `process_s`.

    The program can use `json`, `os`, `sys`, `time`, and `memory()`, which returns the current and the peak MB. It caches plans
    and orders in `cache`, by default in the user's cache folder. Raise a PipelineError if the program fails.
    """
    environment = child_environment() | ({} if cache is None else {CACHE_DIR_VARIABLE: cache})
    begin = time.perf_counter()
    figures = run_python("a process of the benchmark", "-c", _PREAMBLE + program, *arguments, environment=environment)
    return figures | {"process_s": time.perf_counter() - begin}
