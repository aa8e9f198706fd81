"""Benchmarks of the speed of loaders. The limit is the speed of copying rows in memory."""

import contextlib
import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np
import numpy.typing as npt

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import LIMIT, SEED, SPEED, TURNS, Next, limit, rate, seconds_in_turn, seconds_waited
from grain_sft.bench.plans import LENGTH, made_up_lengths, make_corpus
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import StorageError, install_command
from grain_sft.layout import LAYOUTS, Layout, MaterializedLayout, PackedLayout, WindowLayout
from grain_sft.pipeline import Amendment, Pipeline
from grain_sft.prepare import materialize
from grain_sft.sampling import IndexSampler
from grain_sft.source import Element, NpyDataSource
from grain_sft.transforms import NgramFilter, ShiftTargets

VOCABULARY = 100_278  # number of ids of the tokenizer dolma2

# names in the table of `windows`
LIMIT_TOKENS = f"{LIMIT}, tokens only"
READ = "source.read, tokens only"
_STEP_S, _STEPS = 0.005, 200  # seconds of a simulated training step, and number of steps


def windows(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield two tables: the speeds of our loaders of windows and MaxText's, and the time that a trainer waits."""
    _make_tokens(folder, scale.files, scale.tokens)
    corpus = open_corpus(folder, dtype="uint32")
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
        **_maxtext(folder, corpus, scale.sequence_length, scale.batch_size),
    }
    medians = seconds_in_turn(loaders, scale.seconds, scale.repeats, warm=20)
    tokens = scale.sequence_length * scale.batch_size
    figures = {}
    for name, median in medians.items():  # a loader that reads only tokens is compared with a copy of only tokens
        limit_name = LIMIT_TOKENS if name in (LIMIT_TOKENS, READ) else LIMIT
        figures[name] = rate(tokens, median, medians[limit_name])
    with contextlib.closing(filtered.iter()) as batches:
        wait = statistics.median(seconds_waited(batches.__next__, _STEP_S) for _ in range(_STEPS))
    yield Table("throughput", "windows", SPEED, figures)
    name = f"a trainer whose step takes {_STEP_S * 1e3:.0f} ms, filter on"
    yield Table("wait", "waits for its batch", {"ms": "{wait_ms:.3f}"}, {name: {"wait_ms": wait * 1e3}})


def _make_tokens(folder: Path, files: int, tokens: int) -> None:
    """Write raw uint32 files of random tokens."""
    rng = np.random.default_rng(0)
    try:
        for number in range(files):
            rng.integers(0, VOCABULARY, tokens, dtype=np.uint32).tofile(folder / f"{number:03d}.npy")
    except OSError as error:
        fault = f"can't hold {files * tokens * 4 / 1e9:.2f} GB of tokens ({error.strerror or error})"
        raise StorageError(f"{folder}: {fault}. Set --dir to another disk.") from error


def _maxtext(folder: Path, corpus: Corpus, length: int, batch: int) -> dict[str, Next]:
    """Return MaxText's `olmo_grain` loaders, if MaxText is installed. Their index is written to `folder`."""
    try:
        from maxtext.input_pipeline import olmo_data, olmo_data_grain
    except ImportError:
        command = install_command("maxtext")
        print(f"MaxText is not installed: its loader is left out. To include it, run `{command}` in Python 3.12.")
        return {}
    path = str(folder / "index.json")
    corpus.save(path, format="maxtext", sequence_length=length)
    index = olmo_data.load_index(path)
    options = {"seed": SEED, "batch_size": batch, "shard_index": 0, "shard_count": 1}
    make = olmo_data_grain.make_olmo_grain_data_loader
    return {
        "MaxText olmo_grain, filter off": iter(make(index, **options, apply_ngram_filter=False)).__next__,
        "MaxText olmo_grain, filter on": iter(make(index, **options, apply_ngram_filter=True)).__next__,
    }


# names in the tables of `packed`
OURS = "PackedLayout, ShiftTargets"
GRAIN = "grain BestFitPackIterDataset, 64 bins"


class Profile(NamedTuple):
    """Documents of log-normal lengths, and the rows that they are packed into."""

    name: str
    documents: int
    median: int  # tokens of the median document
    sequence_length: int
    batch: int  # rows


PROFILES = (Profile("chat", 200_000, 180, 4096, 8), Profile("think", 12_000, 5_400, 32_768, 2))


def packed(folder: Path, scale: Scale) -> Iterator[Table]:
    """For each of `PROFILES`, yield a table of the speeds of our loaders of packed rows and Grain's."""
    for profile in PROFILES:
        # short turns, so that a change of the machine's load slows all loaders
        medians = seconds_in_turn(_loaders(profile, folder), scale.seconds / TURNS, scale.repeats * TURNS, warm=20)
        tokens = profile.sequence_length * profile.batch
        rows = {}
        for name, median in medians.items():
            rows[name] = rate(tokens, median, medians[LIMIT]) | {"times_grain": medians[GRAIN] / median}
        title = f"packed, {profile.name}: {profile.batch} x {profile.sequence_length:,}"
        yield Table(f"packed, {profile.name}", title, SPEED | {"x Grain": "{times_grain:.1f}"}, rows)


def _loaders(profile: Profile, folder: Path) -> dict[str, Next]:
    """Return loaders of the same documents, by name. A document is random uint32 tokens and an EOS."""
    rng = np.random.default_rng(0)
    ends = np.cumsum(made_up_lengths(profile.documents, profile.median, profile.sequence_length))
    tokens = rng.integers(2, 100_000, int(ends[-1]), dtype=np.uint32)
    tokens[ends - 1] = 1  # EOS; the other tokens are 2 or more
    path = folder / f"{profile.name}.npy"
    rows = folder / f"{profile.name}-rows"
    tokens.tofile(path)
    layout = PackedLayout(open_corpus(path, dtype="uint32", eos_token_id=1), profile.sequence_length, cache_dir=folder)
    materialize(layout, rows)
    source = NpyDataSource(layout)
    written = NpyDataSource(MaterializedLayout(open_corpus(rows)))
    sampler = IndexSampler(len(source), global_batch_size=profile.batch, seed=SEED)
    ours = Pipeline(source, sampler, [ShiftTargets()])
    return {
        LIMIT: limit(ours[0]),
        "limit: documents at random places in memory": _scattered(ours[0], layout, sampler, tokens),
        OURS: ours.iter(threads=0).__next__,
        "the same rows written out (materialized)": Pipeline(written, sampler, [ShiftTargets()]).iter(threads=0).__next__,
        GRAIN: _grain(profile, np.split(tokens.view(np.int32), ends[:-1])).__next__,
    }


def _scattered(batch: Element, layout: Layout, sampler: IndexSampler, tokens: npt.NDArray[np.uint32]) -> Next:
    """Return a function that copies `inputs` document by document from `tokens`. It copies other arrays as `limit` does."""
    copies = []  # for each step, int64 [documents, 3]: target in `inputs`, start in `tokens`, and length of each document
    for step in range(sampler.steps_per_epoch):
        pieces = layout.pieces(sampler.rows(step))
        copies.append(np.stack([pieces.offsets(layout.sequence_length), pieces.start, pieces.length], axis=1))
    steps = itertools.cycle(copies)
    # a memoryview copies 200 tokens in 0.4 us, an array in 0.6 us
    source, inputs = tokens.data, np.empty(batch["inputs"].size, tokens.dtype).data
    copy_others = limit({key: array for key, array in batch.items() if key != "inputs"})

    def copy() -> None:
        for target, start, length in next(steps).tolist():
            inputs[target : target + length] = source[start : start + length]
        copy_others()

    return copy


def _grain(profile: Profile, documents: list[npt.NDArray[np.int32]]) -> Iterator[Any]:
    """Return an endless iterator of batches that Grain packs from shuffled documents in memory."""
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    elements = [{"tokens": document} for document in documents]
    dataset = grain.MapDataset.source(elements).shuffle(seed=SEED).repeat().to_iter_dataset(options)
    lengths = {"tokens": profile.sequence_length}
    packed = grain.experimental.BestFitPackIterDataset(dataset, length_struct=lengths, num_packing_bins=64)
    return iter(packed.batch(profile.batch))


SHARE = 100_000 / 2_270_000  # share of the documents that `withdrawn` withdraws
CASES = {
    136: (("packed", 8, 4096), ("padded", 32, 2048), ("windows", 8, 8192)),  # chats
    5_400: (("packed", 8, LENGTH), ("windows", 2, LENGTH)),  # long documents
}
"""Cases of `withdrawn`, by tokens of the median document. A case is (layout, rows in a batch, tokens in a row)."""


def withdrawn(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table of the time to make a batch, without and with withdrawn documents."""
    figures = {}
    for median, cases in CASES.items():
        here = folder / str(median)
        here.mkdir()
        make_corpus(here, made_up_lengths(scale.plan_documents, median, LENGTH))
        corpus = open_corpus(here / "data", format="olmo", dtype="uint32", eos_token_id=100_257, use_loss_mask=False)
        rng = np.random.default_rng(SEED)
        withdrawn_documents = rng.choice(scale.plan_documents, int(scale.plan_documents * SHARE), replace=False)
        for kind, rows, length in cases:
            options = {"packed": {"cache_dir": here}}.get(kind, {})  # other layouts write no plan
            source = NpyDataSource(LAYOUTS[kind](corpus, length, **options))
            sampler = IndexSampler(len(source), global_batch_size=rows, seed=SEED)
            steps = rng.integers(0, sampler.steps_per_epoch, 1000).tolist()
            loaders = {}
            for name, amendments in (("plain", []), ("withdrawn", [Amendment(0, withdraw=withdrawn_documents)])):
                run = Pipeline(source, sampler, [ShiftTargets()], amendments=amendments)
                loaders[name] = map(run.__getitem__, itertools.cycle(steps)).__next__
            plain, amended = seconds_in_turn(loaders, scale.seconds / TURNS, scale.repeats * TURNS, warm=100).values()
            row = {"us": plain * 1e6, "withdrawn_us": amended * 1e6, "of_speed": plain / amended}
            figures[f"{kind}, {rows} x {length:,}"] = row
    columns = {"us/batch": "{us:.0f}", "withdrawn": "{withdrawn_us:.0f}", "of speed": "{of_speed:.2f}"}
    yield Table("withdrawn", f"{SHARE:.1%} of the documents withdrawn", columns, figures)
