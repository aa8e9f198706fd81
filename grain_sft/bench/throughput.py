"""Tokens a second: ours, plain numpy's, and MaxText's where it is installed; taken in turn in one process.

The limit is `grain_sft.bench.limit`. Beside it stands what numpy takes to copy rows from memory maps into fresh int32 arrays:
one array (the tokens), and five (inputs, targets, positions, and both segmentations).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.bench.limit import LIMIT, limit
from grain_sft.corpus import open_corpus
from grain_sft.errors import StorageError, install_command
from grain_sft.layout import WindowLayout
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets

VOCABULARY = 100_278  # dolma2's
SEED = 34521

ONE_ARRAY = "numpy from memory maps, one array"
FIVE_ARRAYS = "numpy from memory maps, five arrays"
LIMIT_TOKENS = f"{LIMIT}, tokens only"
READ = "source.read, tokens only"

Next = Callable[[], Any]


def make_tokens(folder: Path, files: int, tokens: int) -> list[str]:
    """Raw uint32 files of random tokens; those that are there in the right size are taken as they are."""
    rng = np.random.default_rng(0)
    paths = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in range(files):
            path = folder / f"tokens-{tokens}-{number:03d}.npy"
            if not path.exists() or path.stat().st_size != 4 * tokens:
                rng.integers(0, VOCABULARY, tokens, dtype=np.uint32).tofile(path)
            path.read_bytes()  # into the page cache
            paths.append(str(path))
    except OSError as error:
        size = files * tokens * 4 / 1e9
        raise StorageError(f"{folder}: can't hold {size:.2f} GB of tokens ({error.strerror}). Give --dir.") from error
    return paths


def measure(paths: list[str], length: int, batch: int, seconds: float, repeats: int) -> dict[str, list[float]]:
    """Seconds a batch of every loader, `repeats` times, in turn."""
    loaders = _loaders(paths, length, batch)
    figures: dict[str, list[float]] = {name: [] for name in loaders}
    for next_batch in loaders.values():
        for _ in range(20):
            next_batch()
    for _ in range(repeats):
        for name, next_batch in loaders.items():
            figures[name].append(seconds_a_batch(next_batch, seconds))
    return figures


def waits(paths: list[str], length: int, batch: int, step_seconds: float = 0.01, steps: int = 200) -> float:
    """Median seconds that a trainer waits for a batch made ahead by threads, whose own step takes `step_seconds`."""
    source = NpyDataSource(WindowLayout(open_corpus(paths, dtype="uint32"), length))
    sampler = IndexSampler(len(source), global_batch_size=batch, seed=SEED)
    batches = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()]).iter()
    times = []
    for _ in range(steps):
        times.append(seconds_waited(batches.__next__, step_seconds))
    batches.close()
    wait = statistics.median(times)
    print(
        f"\na trainer whose step takes {step_seconds * 1e3:.0f} ms waits {wait * 1e3:.3f} ms for its batch (filter on)"
    )
    return wait


def report(figures: dict[str, list[float]], tokens: int) -> dict[str, dict[str, float]]:
    """Print a table of the medians; returns them."""
    medians = {name: statistics.median(times) for name, times in figures.items()}
    print(f"{'':44}{'Mtok/s':>9}{'ms/batch':>10}{'of limit':>10}")
    result = {}
    for name, median in medians.items():
        limit = medians[LIMIT_TOKENS if name in (LIMIT_TOKENS, ONE_ARRAY, READ) else LIMIT]
        result[name] = {"mtok_per_s": tokens / median / 1e6, "ms_per_batch": median * 1e3, "of_limit": limit / median}
        row = result[name]
        print(f"{name:44}{row['mtok_per_s']:9.0f}{row['ms_per_batch']:10.3f}{row['of_limit']:10.2f}")
    return result


def seconds_a_batch(next_batch: Next, seconds: float) -> float:
    """How long a batch takes, on average over some `seconds`."""
    begin = time.perf_counter()
    elapsed, count = 0.0, 0
    while elapsed < seconds:
        next_batch()
        count += 1
        elapsed = time.perf_counter() - begin
    return elapsed / count


def seconds_waited(next_batch: Next, step_seconds: float) -> float:
    """How long a trainer waits for its batch after an accelerator has worked for `step_seconds`."""
    time.sleep(step_seconds)
    asked = time.perf_counter()
    next_batch()
    return time.perf_counter() - asked


def _loaders(paths: list[str], length: int, batch: int) -> dict[str, Next]:
    corpus = open_corpus(paths, dtype="uint32")
    source = NpyDataSource(WindowLayout(corpus, length))
    sampler = IndexSampler(len(source), global_batch_size=batch, seed=SEED)
    plain = Pipeline(source, sampler, [ShiftTargets()])
    filtered = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])
    rows = itertools.cycle([sampler.rows(step) for step in range(min(2000, sampler.steps_per_epoch))])
    plainly = _Numpy(paths, length)
    loaders: dict[str, Next] = {
        LIMIT_TOKENS: limit({"tokens": source.read(next(rows))["tokens"]}),
        ONE_ARRAY: lambda: plainly.one(next(rows)),
        READ: lambda: source.read(next(rows)),
        LIMIT: limit(plain[0]),
        FIVE_ARRAYS: lambda: plainly.five(next(rows)),
        "filter off, one thread": plain.iter(threads=0).__next__,
        "filter on, one thread": filtered.iter(threads=0).__next__,
        "filter on, default (prefetching threads)": filtered.iter().__next__,
        "filter on, as grain.DataLoader": iter(filtered.data_loader()).__next__,
    }
    loaders.update(_maxtext(corpus_index=corpus, length=length, batch=batch))
    return loaders


class _Numpy:
    """Plain numpy over memory maps."""

    def __init__(self, paths: list[str], length: int) -> None:
        self._maps = [np.memmap(path, np.uint32, mode="r") for path in paths]
        self._length = length
        self._ends = np.cumsum([len(array) // length for array in self._maps])

    def one(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        tokens = np.empty((len(rows), self._length), np.int32)
        shards = np.searchsorted(self._ends, rows, side="right")
        for at, (row, shard) in enumerate(zip(rows.tolist(), shards.tolist(), strict=True)):
            start = (row - (int(self._ends[shard - 1]) if shard else 0)) * self._length
            tokens[at] = self._maps[shard][start : start + self._length]
        return tokens

    def five(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int32], ...]:
        inputs = self.one(rows)
        targets = np.empty_like(inputs)
        targets[:, :-1] = inputs[:, 1:]
        targets[:, -1] = 0
        positions = np.empty_like(inputs)
        positions[:] = np.arange(self._length, dtype=np.int32)
        segmentation = np.ones_like(inputs)
        targets_segmentation = np.ones_like(inputs)
        targets_segmentation[:, -1] = 0
        return inputs, targets, positions, segmentation, targets_segmentation


def _maxtext(corpus_index: Any, length: int, batch: int) -> dict[str, Next]:
    """MaxText's `olmo_grain` loader over the same files; nothing where MaxText is not installed."""
    try:
        from maxtext.input_pipeline import olmo_data, olmo_data_grain
    except ImportError:
        command = install_command("maxtext")
        print(f"MaxText is not installed: its loader is left out. To include it, run `{command}` in Python 3.12.")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "index.json")
        corpus_index.save(path, format="maxtext", sequence_length=length)
        index = olmo_data.load_index(path)

    def loader(apply_filter: bool) -> Iterator[Any]:
        return iter(
            olmo_data_grain.make_olmo_grain_data_loader(
                index, seed=SEED, batch_size=batch, shard_index=0, shard_count=1, apply_ngram_filter=apply_filter
            )
        )

    return {
        "MaxText olmo_grain, filter off": loader(False).__next__,
        "MaxText olmo_grain, filter on": loader(True).__next__,
    }
