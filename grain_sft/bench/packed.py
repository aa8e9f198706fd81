"""Packed rows: ours, beside Grain's own packing and beside a plain copy of rows that are packed in memory; in turn, in one
process, one thread."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.bench import Benchmark, Figures, Scale
from grain_sft.bench.measuring import LIMIT, SEED, SPEED, Next, limit, rate, seconds_in_turn, table
from grain_sft.corpus import open_corpus
from grain_sft.layout import MaterializedLayout, PackedLayout
from grain_sft.pipeline import Pipeline
from grain_sft.prepare import materialize
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import ShiftTargets

OURS = "PackedLayout, ShiftTargets"
WRITTEN = "the same rows written out (materialized)"
GRAIN = "grain BestFitPackIterDataset, 64 bins"

_TURNS = 8  # of each measurement, so that other work of the machine slows all loaders the same


class Profile(NamedTuple):
    """Documents of log-normal lengths, and the rows that they go to."""

    name: str
    documents: int
    median: int
    sequence_length: int
    batch: int


PROFILES = (Profile("chat", 200_000, 180, 4096, 8), Profile("think", 12_000, 5_400, 32_768, 2))


def _measure(folder: Path, scale: Scale) -> Figures:
    figures = {}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for profile in PROFILES:
            loaders = _loaders(profile, Path(temporary))
            medians = seconds_in_turn(loaders, scale.seconds / _TURNS, scale.repeats * _TURNS, warm=20)
            tokens = profile.sequence_length * profile.batch
            figures[profile.name] = {
                name: rate(tokens, median, medians[LIMIT]) | {"times_grain": medians[GRAIN] / median}
                for name, median in medians.items()
            }
    return {"packed": figures}


def _lines(figures: Figures) -> Iterator[str]:
    for profile in PROFILES:
        title = f"packed, {profile.name}: {profile.batch} x {profile.sequence_length:,}"
        yield from table(title, SPEED | {"x Grain": "{times_grain:.1f}"}, figures["packed"][profile.name])


PACKED = Benchmark(_measure, _lines)


def _loaders(profile: Profile, folder: Path) -> dict[str, Next]:
    """Return loaders of the same documents: random uint32 tokens with an EOS after each document."""
    rng = np.random.default_rng(0)
    lengths = np.exp(rng.normal(np.log(profile.median), 1.0, profile.documents))
    ends = np.cumsum(np.clip(lengths, 1, profile.sequence_length).astype(np.int64))
    tokens = rng.integers(2, 100_000, int(ends[-1]), dtype=np.uint32)
    tokens[ends - 1] = 1
    path, rows = folder / f"{profile.name}.npy", folder / f"{profile.name}-rows"
    tokens.tofile(path)
    layout = PackedLayout(open_corpus(path, dtype="uint32", eos_token_id=1), profile.sequence_length, cache_dir=folder)
    materialize(layout, rows)
    source, written = NpyDataSource(layout), NpyDataSource(MaterializedLayout(open_corpus(rows)))
    sampler = IndexSampler(len(source), global_batch_size=profile.batch, seed=SEED)
    ours = Pipeline(source, sampler, [ShiftTargets()])
    return {
        LIMIT: limit(ours[0]),
        OURS: ours.iter(threads=0).__next__,
        WRITTEN: Pipeline(written, sampler, [ShiftTargets()]).iter(threads=0).__next__,
        GRAIN: _grain(profile, np.split(tokens.view(np.int32), ends[:-1])).__next__,
    }


def _grain(profile: Profile, documents: list[npt.NDArray[np.int32]]) -> Iterator[Any]:
    """Return batches that Grain packs, without end, of documents that are in memory, in a shuffled order."""
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    elements = [{"tokens": document} for document in documents]
    dataset = grain.MapDataset.source(elements).shuffle(seed=SEED).repeat().to_iter_dataset(options)
    packed = grain.experimental.BestFitPackIterDataset(
        dataset, length_struct={"tokens": profile.sequence_length}, num_packing_bins=64
    )
    return iter(packed.batch(profile.batch))
