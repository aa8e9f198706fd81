"""Write the golden files of this folder with the original OLMo-core and MaxText code.

The tests compare our code with values that the original packages gave.  This script is how those
values were made; it holds no code of the originals, it only calls them.  It is not needed to run
the tests.

Needed (with the versions that made the files which are checked in; every file records its own):

* Python 3.10 or later, numpy 2.4.6
* ai2-olmo-core 3.0.0 (which brings torch; the CPU build is enough)
* MaxText 0.2.5, as an *unpacked* wheel: only ``maxtext/input_pipeline/olmo_data.py`` and
  ``olmo_data_grain.py`` are used, so MaxText's many dependencies need not be installed
* grain 0.2.18 (``olmo_data_grain.py`` imports it)

For example::

    pip install ai2-olmo-core==3.0.0 grain==0.2.18 numpy==2.4.6
    pip download --no-deps maxtext==0.2.5
    python -m zipfile -e maxtext-0.2.5-py3-none-any.whl maxtext-wheel
    python make_golden.py --maxtext maxtext-wheel

The files are written next to this script, or into the folder that ``--out`` names:

``olmo_order.json``
    The batches that ``NumpyFSLDataLoader`` over a ``NumpyFSLDataset`` yields to every data parallel
    rank, for small data sets, and digests of the global order of a larger one.
``maxtext_order.json``
    The shards, and the records over three epochs, that MaxText's ``OlmoIndexSampler`` gives.
``maxtext_index.json``
    An index file exactly as MaxText's ``build_index(...).save(path)`` writes it.
``olmo_filter.npz``
    Rows of tokens, most of them near the limit of OLMo-core's repetition filter, with the
    ``instance_mask`` that OLMo-core's dataset gives to each (True: the row passes), and MaxText's
    verdicts on the same rows.

The script gives the same bytes each time it is run with the same versions of the packages.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.metadata
import json
import platform
import sys
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from olmo_core.data import DataCollator, NumpyFSLDataLoader, NumpyFSLDataset
from olmo_core.data.numpy_dataset import InstanceFilterConfig

Rows = NDArray[np.uint16]
Verdicts = NDArray[np.bool_]

UNUSED_TOKEN = 0x7FFFFFFF  # stands in the tail of a file, which no instance may hold


# ------------------------------------------------------------------------------------------------
# The original packages
# ------------------------------------------------------------------------------------------------


def import_maxtext(wheel: Path) -> tuple[Any, Any, str]:
    """Import MaxText's two OLMo modules without running the package's own ``__init__`` files.

    Returns the modules ``olmo_data`` and ``olmo_data_grain``, and MaxText's version.
    """
    for name in ("maxtext", "maxtext.input_pipeline"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = stub
    olmo_data = importlib.import_module("maxtext.input_pipeline.olmo_data")
    olmo_data_grain = importlib.import_module("maxtext.input_pipeline.olmo_data_grain")
    found = [d.version for d in importlib.metadata.distributions(path=[str(wheel)]) if d.metadata["Name"] == "maxtext"]
    if len(found) != 1:
        raise SystemExit(f"{wheel} should hold one maxtext-*.dist-info, but holds {len(found)}")
    return olmo_data, olmo_data_grain, found[0]


def made_by(*packages: str, **more: str) -> dict[str, str]:
    """The versions of installed packages, and those given as keywords."""
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {**more, **versions, "python": platform.python_version()}


def olmo_dataset(
    paths: list[Path], length: int, dtype: Any, instance_filter: InstanceFilterConfig | None = None
) -> NumpyFSLDataset:
    """OLMo-core's dataset over raw token files."""
    return NumpyFSLDataset(
        *(str(path) for path in paths),
        sequence_length=length,
        pad_token_id=0,
        eos_token_id=0,
        vocab_size=2**31,
        dtype=dtype,
        instance_filter_config=instance_filter,
    )


def olmo_loader(
    dataset: NumpyFSLDataset,
    work_dir: Path,
    *,
    batch: int,
    seed: int,
    ranks: int = 1,
    rank: int = 0,
) -> NumpyFSLDataLoader:
    """OLMo-core's loader for one rank; ``batch`` is the global batch size in instances."""
    return NumpyFSLDataLoader(
        dataset,
        collator=DataCollator(pad_token_id=0),
        global_batch_size=batch * dataset.sequence_length,  # OLMo-core counts tokens here
        work_dir=str(work_dir),
        seed=seed,
        dp_world_size=ranks,
        dp_rank=rank,
        fs_local_rank=0,
    )


# ------------------------------------------------------------------------------------------------
# olmo_order.json
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OrderCase:
    """One small data set and one way to load it; ``batch`` counts instances."""

    file_tokens: tuple[int, ...]
    length: int
    batch: int
    ranks: int
    seed: int
    epoch: int


ORDER_CASES = (
    # One file, no remainder anywhere.
    OrderCase((64,), 4, 4, 1, 0, 1),
    OrderCase((64,), 4, 4, 2, 0, 2),
    # Every file has a remainder, and the last batch would not be full.
    OrderCase((100, 37, 250), 8, 6, 3, 34521, 1),
    OrderCase((100, 37, 250), 8, 6, 3, 34521, 2),
    OrderCase((100, 37, 250), 8, 6, 2, 34521, 3),
    # Files that are too short for an instance, one of them without any token.
    OrderCase((15, 160, 0, 7, 333, 15), 16, 4, 4, 34521, 1),
    OrderCase((0, 47, 129), 16, 5, 1, 7, 3),
    # More instances and more ranks.
    OrderCase((1000, 2003, 517), 10, 16, 8, 34521, 1),
    OrderCase((1000, 2003, 517), 10, 24, 8, 34521, 2),
    OrderCase((1201, 2, 777, 1023), 8, 32, 4, 0, 1),
    OrderCase((1201, 2, 777, 1023), 8, 12, 3, 0, 3),
    OrderCase((2799,), 7, 48, 8, 123456789, 2),
    # The file ends one token before, at, and after the end of an instance.
    OrderCase((127, 128, 129), 32, 3, 3, 1, 1),
    # One instance a token: a batch is as many tokens as instances.
    OrderCase((19, 22), 1, 8, 2, 34521, 2),
    # Fewer instances than a batch: no batch at all.  As many: one batch.
    OrderCase((30, 9), 5, 8, 2, 34521, 1),
    OrderCase((30, 13), 5, 8, 2, 34521, 1),
)


def write_order_files(case: OrderCase, folder: Path) -> tuple[list[Path], int]:
    """Write raw uint32 files in which every token of instance ``i`` is ``i``.

    Returns their paths and the number of instances.
    """
    paths, first = [], 0
    for number, n_tokens in enumerate(case.file_tokens):
        instances = n_tokens // case.length
        tokens = np.full(n_tokens, UNUSED_TOKEN, dtype="<u4")
        ids = np.arange(first, first + instances, dtype="<u4")
        tokens[: instances * case.length] = np.repeat(ids, case.length)
        path = folder / f"part-{number}.npy"
        tokens.tofile(path)
        paths.append(path)
        first += instances
    return paths, first


def olmo_batches(case: OrderCase) -> dict[str, Any]:
    """All the batches of one epoch, as OLMo-core's loader yields them to each rank."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        paths, instances = write_order_files(case, folder)
        dataset = olmo_dataset(paths, case.length, np.uint32)
        dataset.prepare()
        assert len(dataset) == instances
        by_rank: list[list[list[int]]] = []
        for rank in range(case.ranks):
            loader = olmo_loader(dataset, folder, batch=case.batch, seed=case.seed, ranks=case.ranks, rank=rank)
            loader.reshuffle(epoch=case.epoch)
            batches = []
            for batch in loader:
                indices = batch["index"].tolist()
                # The tokens must say the same as the index does.
                assert (batch["input_ids"].numpy() == np.array(indices)[:, None]).all()
                batches.append(indices)
            assert len(batches) == loader.total_batches
            loader.reset()
            by_rank.append(batches)
    return {
        "file_tokens": list(case.file_tokens),
        "L": case.length,
        "N": instances,
        "global_batch_size": case.batch,
        "ranks": case.ranks,
        "seed": case.seed,
        "epoch": case.epoch,
        "batches": [list(ranks) for ranks in zip(*by_rank, strict=True)],
    }


def olmo_large_order(instances: int, seed: int, epochs: tuple[int, ...]) -> list[dict[str, Any]]:
    """Digests of the loader's global order of a larger data set."""
    out = []
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "tokens.npy"
        np.zeros(instances, dtype="<u4").tofile(path)
        dataset = olmo_dataset([path], 1, np.uint32)
        loader = olmo_loader(dataset, Path(temp), batch=1, seed=seed)
        for epoch in epochs:
            loader.reshuffle(epoch=epoch)
            order = np.array(loader.get_global_indices())
            assert order.dtype == np.uint32 and order.shape == (instances,)
            out.append(
                {
                    "N": instances,
                    "seed": seed,
                    "epoch": epoch,
                    "sha256": hashlib.sha256(order.astype("<u4").tobytes()).hexdigest(),
                    "first": order[:16].tolist(),
                    "last": order[-16:].tolist(),
                }
            )
            loader.reset()
    return out


def olmo_order() -> dict[str, Any]:
    """What ``olmo_order.json`` holds."""
    return {
        "made_by": made_by("ai2-olmo-core", "numpy"),
        "about": "batches: [batch][rank] -> instance indices, of the whole epoch (epochs count "
        "from 1); large: sha256 of the global order as little-endian uint32",
        "cases": [olmo_batches(case) for case in ORDER_CASES],
        "large": olmo_large_order(100_003, 34521, (1, 2)),
    }


# ------------------------------------------------------------------------------------------------
# maxtext_order.json and maxtext_index.json
# ------------------------------------------------------------------------------------------------

# (total_instances, seed, epoch, shard_count); epochs count from 0.
SHARD_CASES = (
    (16, 0, 0, 1),
    (16, 0, 1, 2),
    (17, 0, 0, 4),
    (100, 34521, 0, 3),
    (100, 34521, 1, 3),
    (100, 34521, 2, 8),
    (199, 7, 0, 8),
    (200, 7, 5, 5),
    (53, 123456789, 1000, 2),
    (5, 1, 0, 8),  # fewer instances than shards: every shard is empty
    (1, 3, 0, 1),
)


def maxtext_order(olmo_data_grain: Any, version: str) -> dict[str, Any]:
    """What ``maxtext_order.json`` holds."""
    cases = []
    for total, seed, epoch, count in SHARD_CASES:
        shards = []
        for shard in range(count):
            sampler = olmo_data_grain.OlmoIndexSampler(
                total_instances=total, seed=seed, shard_index=shard, shard_count=count
            )
            shards.append(sampler.shard_indices(seed=seed, epoch=epoch).tolist())
        cases.append(
            {
                "total_instances": total,
                "seed": seed,
                "epoch": epoch,
                "shard_count": count,
                "shards": shards,
            }
        )

    total, seed, count, epochs = 47, 34521, 3, 3
    keys = []
    for shard in range(count):
        sampler = olmo_data_grain.OlmoIndexSampler(
            total_instances=total, seed=seed, shard_index=shard, shard_count=count
        )
        steps = epochs * sampler.num_local_instances_per_epoch
        keys.append([int(sampler[i].record_key) for i in range(steps)])

    large_total, large_seed, large_epoch = 100_003, 7, 0
    order = olmo_data_grain.OlmoIndexSampler(total_instances=large_total, seed=large_seed).shuffled_global_indices(
        seed=large_seed, epoch=large_epoch
    )
    return {
        "made_by": made_by("grain", "numpy", maxtext=version),
        "about": "shards: [shard_index] -> shard_indices(seed, epoch); record_keys: [shard_index] "
        "-> the keys of sampler[0], sampler[1], ... over three epochs; large: sha256 of "
        "shuffled_global_indices as little-endian int64; epochs count from 0",
        "cases": cases,
        "records": {
            "total_instances": total,
            "seed": seed,
            "shard_count": count,
            "epochs": epochs,
            "record_keys": keys,
        },
        "large": {
            "total_instances": large_total,
            "seed": large_seed,
            "epoch": large_epoch,
            "sha256": hashlib.sha256(order.astype("<i8").tobytes()).hexdigest(),
            "first": order[:16].tolist(),
            "last": order[-16:].tolist(),
        },
    }


def write_maxtext_index(olmo_data: Any, path: Path) -> None:
    """Let MaxText write an index over three files that need not exist."""
    n_tokens = {
        "gs://bucket/a/part-0.npy": 1000,
        "gs://bucket/a/part-1.npy": 128,
        "gs://bucket/b/part-0.npy": 515,
    }
    labels = ("a", "a", "b")
    index = olmo_data.build_index(
        list(zip(n_tokens, labels, strict=True)),
        128,
        tokenizer="allenai/dolma3-tokenizer",
        header_reader=lambda name: ("uint32", (n_tokens[name],)),
    )
    index.save(str(path))


# ------------------------------------------------------------------------------------------------
# olmo_filter.npz: the rows
# ------------------------------------------------------------------------------------------------


class RowMaker:
    """Makes rows of ``length`` tokens with periodic spans planted in a random background."""

    def __init__(self, length: int, seed: int):
        self.length = length
        self.vocab_shares = {2: 0.42, 3: 0.36, 50: 0.19, 1000: 0.03}
        self.rng = np.random.default_rng([seed, length])
        self.rows: list[Rows] = []

    def integer(self, low: int, high: int) -> int:
        """A random integer in ``[low, high]``."""
        return int(self.rng.integers(low, high + 1))

    def vocab(self) -> int:
        """A random vocabulary size: mostly small, which makes near misses."""
        return int(self.rng.choice(list(self.vocab_shares), p=list(self.vocab_shares.values())))

    def background(self, vocab: int) -> Rows:
        return self.rng.integers(0, vocab, self.length).astype(np.uint16)

    def pattern(self, period: int, vocab: int) -> Rows:
        """A random pattern that has no shorter period."""
        while True:
            word = self.rng.integers(0, vocab, period).astype(np.uint16)
            if not any(period % d == 0 and (word == np.tile(word[:d], period // d)).all() for d in range(1, period)):
                return word

    def change(self, row: Rows, at: int, unlike: int, vocab: int) -> None:
        """Set one token to a random one that is not ``unlike``."""
        row[at] = (unlike + self.integer(1, vocab - 1)) % vocab

    def fill(self, row: Rows, start: int, stop: int, word: Rows, phase: int) -> None:
        """Make ``row[start:stop]`` periodic; ``row[i]`` is ``word[(i - phase) % period]``."""
        at = np.arange(start, stop)
        row[start:stop] = word[(at - phase) % len(word)]

    def bound(self, row: Rows, start: int, stop: int, period: int, vocab: int) -> None:
        """Change the tokens next to a periodic span so that it is exactly that long."""
        if start > 0:
            self.change(row, start - 1, int(row[start - 1 + period]), vocab)
        if stop < self.length:
            self.change(row, stop, int(row[stop - period]), vocab)

    def start(self, size: int, place: str) -> int:
        """Where a span of ``size`` tokens begins at a place of the row."""
        if place == "head":
            return 0
        if place == "tail":
            return self.length - size
        slack = self.length - size
        return self.integer(1, slack - 1) if slack >= 2 else slack // 2

    def add(self, row: Rows) -> None:
        """Keep a row, now and then with its tokens moved to the top of the uint16 range."""
        if self.rng.random() < 0.04:
            row = (np.uint16(65535) - row).astype(np.uint16)
        assert row.dtype == np.uint16 and row.shape == (self.length,)
        self.rows.append(row)

    # Kinds of rows.  Each method adds one row, or none where the span does not fit.

    def span(
        self,
        period: int,
        repeats: int,
        extra: int,
        place: str,
        *,
        exact: bool,
        broken: bool = False,
    ) -> None:
        """A span of ``repeats`` periods and ``extra`` tokens; ``broken``: one of them changed."""
        size = period * repeats + extra
        if size > self.length:
            return
        vocab = self.vocab()
        row = self.background(vocab)
        start = self.start(size, place)
        self.fill(row, start, start + size, self.pattern(period, vocab), start)
        if exact:
            self.bound(row, start, start + size, period, vocab)
        if broken:
            at = self.integer(start, start + size - 1)
            self.change(row, at, int(row[at]), vocab)
        self.add(row)

    def two_spans(self, period: int, first: int, second: int) -> None:
        """Two spans of the same pattern with one token between them."""
        size = period * (first + second) + 1
        if size > self.length:
            return
        vocab = self.vocab()
        row = self.background(vocab)
        word = self.pattern(period, vocab)
        start = self.start(size, str(self.rng.choice(["head", "tail", "middle"])))
        between = start + period * first
        self.fill(row, start, start + size, word, start)
        if self.rng.random() < 0.5:  # the pattern starts anew, or else goes on
            self.fill(row, between + 1, start + size, word, between + 1)
        self.change(row, between, int(row[between - period]), vocab)
        self.bound(row, start, start + size, period, vocab)
        self.add(row)

    def wrap(self, period: int, head: int, tail: int, *, aligned: bool) -> None:
        """Periodic head and tail with the same pattern, each a number of periods long.

        ``aligned``: the tail is in phase with the head when both count from the row's start, so
        that the last row of a reshape to ``(-1, period)`` equals the first as far as it goes.
        Otherwise the head goes on where the tail stops, as if the row were a ring.
        """
        extra = self.integer(0, period - 1)
        in_head, in_tail = head * period, tail * period
        if self.rng.random() < 0.5:
            in_head += extra
        else:
            in_tail += extra
        if in_head + in_tail > self.length - 1:
            return
        vocab = self.vocab()
        row = self.background(vocab)
        word = self.pattern(period, vocab)
        self.fill(row, 0, in_head, word, 0)
        stop = self.length - in_tail
        self.fill(row, stop, self.length, word, 0 if aligned else self.length % period)
        if in_tail >= period:
            self.bound(row, stop, self.length, period, vocab)
        if in_head >= period and in_head < stop - 1:
            self.bound(row, 0, in_head, period, vocab)
        self.add(row)

    def periodic(self, period: int) -> None:
        """A row that is periodic from its first to its last token."""
        vocab = self.vocab()
        row = self.background(vocab)
        self.fill(row, 0, self.length, self.pattern(period, vocab), 0)
        self.add(row)

    def random(self) -> None:
        vocab = self.vocab()
        self.add(self.background(vocab))


PLACES = ("head", "tail", "middle")


def filter_rows(length: int, n_rows: int, *, seed: int = 20240229, density: int = 1, small: bool = False) -> Rows:
    """At least ``n_rows`` rows; ``small`` adds spans of fewer repeats, for other limits."""
    make = RowMaker(length, seed)

    # Every period, number of repeats near the limit of 32, and place.
    for period in range(1, 17):
        for repeats in range(29, 36):
            for place in PLACES:
                for extra in sorted({0, period - 1, make.integer(0, period - 1)}):
                    near = 30 <= repeats <= 33 and period <= 13
                    if density < 2 and not near and extra:
                        continue
                    make.span(period, repeats, extra, place, exact=near or extra == 0)
            # One token of the span changed; the span next to chance tokens.
            for place in PLACES if density > 1 else (PLACES[make.integer(0, 2)],):
                if repeats >= 31:
                    extra = make.integer(0, period - 1)
                    make.span(period, repeats, extra, place, exact=True, broken=True)
            extra = make.integer(0, period - 1)
            make.span(period, repeats, extra, "middle", exact=False)
    # Constant spans, the only ones that are near the limit in the shortest rows.
    for repeats in range(29, 36):
        for place in PLACES:
            for broken in (False, True):
                make.span(1, repeats, 0, place, exact=not broken, broken=broken)
    for period in range(1, 14):
        for _ in range(10 * density):
            make.two_spans(period, make.integer(16, 31), make.integer(16, 31))
        # A head and a tail that would only together reach the limit, were the row a ring.
        for aligned in (True, False):
            for long in range(28, 33):
                for short in sorted({1, make.integer(1, 4)}):
                    make.wrap(period, short, long, aligned=aligned)
                    make.wrap(period, long, short, aligned=aligned)
    if small:
        # In a background that seldom repeats by chance.
        make.vocab_shares = {3: 0.1, 50: 0.6, 1000: 0.3}
        for period in range(1, 14):
            for place in PLACES:
                make.span(period, 1, period - 1, place, exact=True)
                make.span(period, 2, period - 1, place, exact=True)
                make.span(period, 3, 0, place, exact=True)
                make.span(period, 3, period - 1, place, exact=True, broken=True)
            for repeats in (2, 4, 5, 6, 9, 10, 11):
                for place in PLACES:
                    extra = make.integer(0, period - 1)
                    make.span(period, repeats, extra, place, exact=make.rng.random() < 0.7)
            for repeats in (2, 3, 4, 9):
                make.wrap(period, 1, repeats, aligned=True)
                make.wrap(period, repeats, 1, aligned=True)
    for period in range(1, 17):
        make.periodic(period)
    for token in (0, 1, 999, 65535):
        make.add(np.full(length, token, dtype=np.uint16))
    for _ in range(max(40, n_rows - len(make.rows))):
        make.random()
    return np.stack(make.rows)


# ------------------------------------------------------------------------------------------------
# olmo_filter.npz: the verdicts
# ------------------------------------------------------------------------------------------------


def olmo_verdicts(rows: Rows, max_period: int, max_count: int, min_period: int = 1) -> Verdicts:
    """The ``instance_mask`` of every row, read through OLMo-core's dataset from a token file."""
    instance_filter = InstanceFilterConfig(
        repetition_max_period=max_period,
        repetition_min_period=min_period,
        repetition_max_count=max_count,
    )
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "rows.npy"
        rows.astype("<u2").tofile(path)
        dataset = olmo_dataset([path], rows.shape[1], np.uint16, instance_filter)
        assert len(dataset) == len(rows)
        verdicts = []
        for i, row in enumerate(rows):
            item = dataset[i]
            assert (item["input_ids"].numpy() == row).all()
            verdicts.append(item["instance_mask"])
    return np.array(verdicts, dtype=np.bool_)


def maxtext_verdicts(olmo_data: Any, rows: Rows) -> Verdicts:
    """MaxText's verdicts, on int64 rows as OLMo-core has them."""
    verdicts = [olmo_data.is_clean_instance(row) for row in rows.astype(np.int64)]
    return np.array(verdicts, dtype=np.bool_)


def olmo_filter(olmo_data: Any, version: str) -> dict[str, NDArray[Any]]:
    """The arrays of ``olmo_filter.npz``."""
    groups = {
        512: filter_rows(512, 1400, density=1),
        521: filter_rows(521, 650, density=1),
        455: filter_rows(455, 450, density=1),
        96: filter_rows(96, 400, density=2, small=True),
        35: filter_rows(35, 200, density=2),
    }
    about = made_by("ai2-olmo-core", "numpy", maxtext=version)
    arrays: dict[str, NDArray[Any]] = {"made_by": np.array(json.dumps(about))}
    for length, rows in groups.items():
        arrays[f"rows_{length}"] = rows
        arrays[f"clean_{length}"] = olmo_verdicts(rows, 13, 32)
        arrays[f"maxtext_clean_{length}"] = maxtext_verdicts(olmo_data, rows)
    rows = groups[96]
    arrays["clean_96_p5_c3"] = olmo_verdicts(rows, 5, 3)
    arrays["clean_96_p7_c10"] = olmo_verdicts(rows, 7, 10)
    arrays["clean_96_p13_min3_c5"] = olmo_verdicts(rows, 13, 5, min_period=3)
    arrays["clean_96_p13_c2"] = olmo_verdicts(rows, 13, 2)
    arrays["clean_96_p13_c1"] = olmo_verdicts(rows, 13, 1)
    return arrays


# ------------------------------------------------------------------------------------------------


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON with one line for each entry of a list of dictionaries."""
    parts = []
    for key, item in value.items():
        if isinstance(item, list):
            lines = ",\n  ".join(json.dumps(entry, separators=(",", ":")) for entry in item)
            text = f"[\n  {lines}\n ]"
        else:
            text = json.dumps(item, separators=(",", ":"))
        parts.append(f' "{key}": {text}')
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the golden files of this folder.")
    parser.add_argument("--maxtext", type=Path, required=True, help="an unpacked wheel of MaxText")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    olmo_data, olmo_data_grain, version = import_maxtext(arguments.maxtext)

    write_json(out / "olmo_order.json", olmo_order())
    write_json(out / "maxtext_order.json", maxtext_order(olmo_data_grain, version))
    write_maxtext_index(olmo_data, out / "maxtext_index.json")
    arrays = olmo_filter(olmo_data, version)
    np.savez_compressed(out / "olmo_filter.npz", **arrays)

    for name, array in arrays.items():
        if name.startswith("rows"):
            print(f"{name}: {array.shape}")
        elif array.dtype == np.bool_:
            print(f"{name}: {int(array.sum())} of {len(array)} rows pass")
    for name in ("olmo_order.json", "maxtext_order.json", "maxtext_index.json", "olmo_filter.npz"):
        print(f"{name}: {(out / name).stat().st_size} bytes")


if __name__ == "__main__":
    main()
