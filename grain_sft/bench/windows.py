"""Windows: ours, plain numpy's, and MaxText's where it is installed; in turn, in one process.

numpy copies rows from memory maps into fresh int32 arrays: into one (the tokens), and into five (inputs, targets,
positions, and both segmentations).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.bench import Benchmark, Figures, Scale
from grain_sft.bench.measuring import (
    LIMIT,
    SEED,
    Next,
    limit,
    line,
    rate,
    seconds_in_turn,
    seconds_waited,
)
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import StorageError, install_command
from grain_sft.layout import WindowLayout
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets

VOCABULARY = 100_278  # dolma2's

ONE_ARRAY = "numpy from memory maps, one array"
FIVE_ARRAYS = "numpy from memory maps, five arrays"
LIMIT_TOKENS = f"{LIMIT}, tokens only"
READ = "source.read, tokens only"

_WARM = 20  # batches
_STEP_S, _STEPS = 0.01, 200  # of a trainer that waits for batches


def _measure(folder: Path, scale: Scale) -> Figures:
    paths = _make_tokens(folder, scale.files, scale.tokens)
    corpus = open_corpus(paths, dtype="uint32")
    loaders = _loaders(corpus, paths, scale.sequence_length, scale.batch_size)
    for next_batch in loaders.values():
        for _ in range(_WARM):
            next_batch()
    times = seconds_in_turn(loaders, scale.seconds, scale.repeats)
    medians = {name: statistics.median(found) for name, found in times.items()}
    tokens = scale.sequence_length * scale.batch_size
    figures = {}
    for name, median in medians.items():
        of = LIMIT_TOKENS if name in (LIMIT_TOKENS, ONE_ARRAY, READ) else LIMIT
        figures[name] = rate(tokens, median, medians[of])
    filtered = _pipelines(corpus, scale.sequence_length, scale.batch_size)[1].iter()
    wait = statistics.median(seconds_waited(filtered.__next__, _STEP_S) for _ in range(_STEPS))
    filtered.close()
    return {"throughput": figures, "wait_s": wait}


def _lines(figures: Figures) -> Iterator[str]:
    yield line("windows", "Mtok/s", "ms/batch", "of limit")
    for name, row in figures["throughput"].items():
        yield line(name, f"{row['mtok_per_s']:.0f}", f"{row['ms_per_batch']:.3f}", f"{row['of_limit']:.2f}")
    yield (
        f"a trainer whose step takes {_STEP_S * 1e3:.0f} ms waits {figures['wait_s'] * 1e3:.3f} ms for its batch (filter on)"
    )


WINDOWS = Benchmark(_measure, _lines)


def _make_tokens(folder: Path, files: int, tokens: int) -> list[str]:
    """Write raw uint32 files of random tokens; files of the right size are used again."""
    rng = np.random.default_rng(0)
    paths = []
    try:
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


def _sampler(source: NpyDataSource, batch: int) -> IndexSampler:
    return IndexSampler(len(source), global_batch_size=batch, seed=SEED)


def _pipelines(corpus: Corpus, length: int, batch: int) -> tuple[Pipeline, Pipeline]:
    """Return a pipeline without the filter, and one with it."""
    source = NpyDataSource(WindowLayout(corpus, length))
    sampler = _sampler(source, batch)
    return Pipeline(source, sampler, [ShiftTargets()]), Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])


def _loaders(corpus: Corpus, paths: list[str], length: int, batch: int) -> dict[str, Next]:
    plain, filtered = _pipelines(corpus, length, batch)
    source = NpyDataSource(WindowLayout(corpus, length))
    sampler = _sampler(source, batch)
    rows = itertools.cycle([sampler.rows(step) for step in range(min(2000, sampler.steps_per_epoch))])
    numpy_rows = _Numpy(paths, length)
    return {
        LIMIT_TOKENS: limit({"tokens": source.read(next(rows))["tokens"]}),
        ONE_ARRAY: lambda: numpy_rows.one(next(rows)),
        READ: lambda: source.read(next(rows)),
        LIMIT: limit(plain[0]),
        FIVE_ARRAYS: lambda: numpy_rows.five(next(rows)),
        "filter off, one thread": plain.iter(threads=0).__next__,
        "filter on, one thread": filtered.iter(threads=0).__next__,
        "filter on, default (prefetching threads)": filtered.iter().__next__,
        "filter on, as grain.DataLoader": iter(filtered.data_loader()).__next__,
        **_maxtext(corpus, length, batch),
    }


class _Numpy:
    """Plain numpy over memory maps."""

    def __init__(self, paths: list[str], length: int) -> None:
        self._maps = [np.memmap(path, np.uint32, mode="r") for path in paths]
        self._length = length
        self._ends = np.cumsum([len(array) // length for array in self._maps])

    def one(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        tokens = np.empty((len(rows), self._length), np.int32)
        shards = np.searchsorted(self._ends, rows, side="right")
        for slot, (row, shard) in enumerate(zip(rows.tolist(), shards.tolist(), strict=True)):
            start = (row - (int(self._ends[shard - 1]) if shard else 0)) * self._length
            tokens[slot] = self._maps[shard][start : start + self._length]
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


def _maxtext(corpus: Corpus, length: int, batch: int) -> dict[str, Next]:
    """Return MaxText's `olmo_grain` loaders over the same files; none where MaxText is not installed."""
    try:
        from maxtext.input_pipeline import olmo_data, olmo_data_grain
    except ImportError:
        command = install_command("maxtext")
        print(f"MaxText is not installed: its loader is left out. To include it, run `{command}` in Python 3.12.")
        return {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "index.json")
        corpus.save(path, format="maxtext", sequence_length=length)
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
