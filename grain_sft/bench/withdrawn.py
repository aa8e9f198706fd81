"""Benchmark of batches with 4.4 % of the documents withdrawn (100,000 of 2,270,000), compared with none withdrawn."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import SEED, TURNS, seconds_in_turn
from grain_sft.bench.plans import LENGTH, made_up_lengths, make_corpus
from grain_sft.corpus import open_corpus
from grain_sft.layout import LAYOUTS
from grain_sft.pipeline import Amendment, Pipeline
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import ShiftTargets

SHARE = 100_000 / 2_270_000
CASES = {
    136: (("packed", 8, 4096), ("padded", 32, 2048), ("windows", 8, 8192)),  # chats
    5_400: (("packed", 8, LENGTH), ("windows", 2, LENGTH)),  # long documents
}
"""Measured cases, by the median document's tokens: the kind of layout, rows in a batch, and tokens in a row."""


def withdrawn(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield a table: microseconds of a batch without and with the withdrawal, and their quotient, the share of speed left."""
    figures = {}
    for median, cases in CASES.items():
        here = folder / str(median)
        here.mkdir()
        make_corpus(here, made_up_lengths(scale.plan_documents, median, LENGTH))
        data = str(here / "data")
        corpus = open_corpus(data, format="olmo", dtype="uint32", eos_token_id=100_257, use_loss_mask=False)
        rng = np.random.default_rng(SEED)
        count = int(scale.plan_documents * SHARE)
        withdrawn_documents = rng.choice(scale.plan_documents, count, replace=False)
        for kind, rows, length in cases:
            options = {"packed": {"cache_dir": here}}.get(kind, {})  # others write no plan
            source = NpyDataSource(LAYOUTS[kind](corpus, length, **options))
            sampler = IndexSampler(len(source), global_batch_size=rows, seed=SEED)
            steps = rng.integers(0, sampler.steps_per_epoch, 1000).tolist()
            loaders = {}
            for name, amendments in (("plain", []), ("withdrawn", [Amendment(0, withdraw=withdrawn_documents)])):
                run = Pipeline(source, sampler, [ShiftTargets()], amendments=amendments)
                loaders[name] = map(run.__getitem__, itertools.cycle(steps)).__next__
            plain, amended = seconds_in_turn(loaders, scale.seconds / TURNS, scale.repeats * TURNS, 100).values()
            figures[f"{kind}, {rows} x {length:,}"] = {
                "us": plain * 1e6,
                "withdrawn_us": amended * 1e6,
                "of_speed": plain / amended,
            }
    columns = {"us/batch": "{us:.0f}", "withdrawn": "{withdrawn_us:.0f}", "of speed": "{of_speed:.2f}"}
    yield Table("withdrawn", f"{SHARE:.1%} of the documents withdrawn", columns, figures)
