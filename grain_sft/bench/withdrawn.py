"""Speed of batches with 100,000 of 2,270,000 documents withdrawn, or the same share, compared with none withdrawn."""

import itertools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from grain_sft.bench import Scale, Table
from grain_sft.bench.measuring import SEED, seconds_in_turn
from grain_sft.bench.plans import LENGTH, made_up_lengths, make_corpus
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.layout import Layout, PackedLayout, PaddedLayout, WindowLayout
from grain_sft.pipeline import Amendment, Pipeline
from grain_sft.sampling import IndexSampler
from grain_sft.source import NpyDataSource
from grain_sft.transforms import ShiftTargets

SHARE = 100_000 / 2_270_000
CHATS, THINK = 136, 5_400  # tokens of the median document

Make = Callable[[Corpus, Path], Layout]
LAYOUTS: dict[int, dict[str, tuple[Make, int]]] = {
    CHATS: {
        "packed, 8 x 4,096": (lambda corpus, cache: PackedLayout(corpus, 4096, cache_dir=cache), 8),
        "padded, 32 x 2,048": (lambda corpus, cache: PaddedLayout(corpus, 2048), 32),
        "windows, 8 x 8,192": (lambda corpus, cache: WindowLayout(corpus, 8192), 8),
    },
    THINK: {
        "packed, 8 x 32,768": (lambda corpus, cache: PackedLayout(corpus, LENGTH, cache_dir=cache), 8),
        "windows, 2 x 32,768": (lambda corpus, cache: WindowLayout(corpus, LENGTH), 2),
    },
}
"""Layouts and rows of a batch, for chats and for long documents."""

_TURNS = 8  # of each measurement, so that other work of the machine slows both runs the same


def withdrawn(folder: Path, scale: Scale) -> Iterator[Table]:
    """Yield the microseconds of a batch without and with the withdrawal, and the share of the speed that is left."""
    figures = {}
    for median, layouts in LAYOUTS.items():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            here = Path(temporary)
            make_corpus(here, made_up_lengths(scale.plan_documents, median, LENGTH))
            data = str(here / "data")
            corpus = open_corpus(data, format="olmo", dtype="uint32", eos_token_id=100_257, use_loss_mask=False)
            rng = np.random.default_rng(SEED)
            gone = rng.choice(scale.plan_documents, int(scale.plan_documents * SHARE), replace=False)
            for name, (make, rows) in layouts.items():
                source = NpyDataSource(make(corpus, here))
                sampler = IndexSampler(len(source), global_batch_size=rows, seed=SEED)
                steps = rng.integers(0, sampler.steps_per_epoch, 1000).tolist()
                loaders = {}
                for amendments in ([], [Amendment(0, withdraw=gone)]):
                    run = Pipeline(source, sampler, [ShiftTargets()], amendments=amendments)
                    loaders[str(len(amendments))] = map(run.__getitem__, itertools.cycle(steps)).__next__
                plain, without = seconds_in_turn(loaders, scale.seconds / _TURNS, scale.repeats * _TURNS, 100).values()
                figures[name] = {"us": plain * 1e6, "withdrawn_us": without * 1e6, "of_speed": plain / without}
    columns = {"us/batch": "{us:.0f}", "withdrawn": "{withdrawn_us:.0f}", "of speed": "{of_speed:.2f}"}
    yield Table("withdrawn", f"{SHARE:.1%} of the documents withdrawn", columns, figures)
