"""Windows: ours, beside a plain copy of rows and MaxText's loader where it is installed; in turn, in one process."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grain_sft.bench import Benchmark, Figures, Scale
from grain_sft.bench.measuring import LIMIT, SEED, SPEED, Next, limit, rate, seconds_in_turn, seconds_waited, table
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import StorageError, install_command
from grain_sft.layout import WindowLayout
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets

VOCABULARY = 100_278  # dolma2's

LIMIT_TOKENS = f"{LIMIT}, tokens only"
READ = "source.read, tokens only"
_STEP_S, _STEPS = 0.01, 200  # of a trainer that waits for batches


def _measure(folder: Path, scale: Scale) -> Figures:
    corpus = open_corpus(_make_tokens(folder, scale.files, scale.tokens), dtype="uint32")
    source = NpyDataSource(WindowLayout(corpus, scale.sequence_length))
    sampler = IndexSampler(len(source), global_batch_size=scale.batch_size, seed=SEED)
    plain = Pipeline(source, sampler, [ShiftTargets()])
    filtered = Pipeline(source, sampler, [NgramFilter(), ShiftTargets()])
    rows = itertools.cycle([sampler.rows(step) for step in range(min(2000, sampler.steps_per_epoch))])
    loaders: dict[str, Next] = {
        LIMIT_TOKENS: limit({"tokens": source.read(next(rows))["tokens"]}),
        READ: lambda: source.read(next(rows)),
        LIMIT: limit(plain[0]),
        "filter off, one thread": plain.iter(threads=0).__next__,
        "filter on, one thread": filtered.iter(threads=0).__next__,
        "filter on, default (prefetching threads)": filtered.iter().__next__,
        "filter on, as grain.DataLoader": iter(filtered.data_loader()).__next__,
        **_maxtext(corpus, scale.sequence_length, scale.batch_size),
    }
    medians = seconds_in_turn(loaders, scale.seconds, scale.repeats, warm=20)
    tokens, limits = scale.sequence_length * scale.batch_size, dict.fromkeys((LIMIT_TOKENS, READ), LIMIT_TOKENS)
    figures = {name: rate(tokens, median, medians[limits.get(name, LIMIT)]) for name, median in medians.items()}
    with contextlib.closing(filtered.iter()) as batches:
        wait = statistics.median(seconds_waited(batches.__next__, _STEP_S) for _ in range(_STEPS))
    return {"throughput": figures, "wait_s": wait}


def _lines(figures: Figures) -> Iterator[str]:
    yield from table("windows", SPEED, figures["throughput"])
    wait = figures["wait_s"] * 1e3
    yield f"a trainer whose step takes {_STEP_S * 1e3:.0f} ms waits {wait:.3f} ms for its batch (filter on)"


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
    options = {"seed": SEED, "batch_size": batch, "shard_index": 0, "shard_count": 1}
    make = olmo_data_grain.make_olmo_grain_data_loader
    return {
        "MaxText olmo_grain, filter off": iter(make(index, **options, apply_ngram_filter=False)).__next__,
        "MaxText olmo_grain, filter on": iter(make(index, **options, apply_ngram_filter=True)).__next__,
    }
