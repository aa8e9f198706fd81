"""Write golden files with the original OLMo-core and MaxText: `python make_golden.py --maxtext maxtext-wheel`.

olmo_order.json: batches that `NumpyFSLDataLoader` over a `NumpyFSLDataset` yields to every data parallel rank, for small
  data sets, and digests of the global order of a larger one.
maxtext_order.json: shards, and records over three epochs, of MaxText's `OlmoIndexSampler`.
maxtext_index.json: an index file as MaxText's `build_index(...).save(path)` writes it.
olmo_filter.npz: rows of tokens, most of them near the limit of OLMo-core's repetition filter, with the `instance_mask` that
  OLMo-core's dataset gives to each (True: the row passes), and MaxText's verdicts on the same rows.

Needed, in the versions that made the files: ai2-olmo-core 3.0.0 (with torch, CPU build), grain 0.2.18, numpy 2.4.6, and
MaxText 0.2.5 as an unpacked wheel (pip download --no-deps maxtext==0.2.5; python -m zipfile -e maxtext-*.whl maxtext-wheel).
The same versions give the same bytes.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from making import olmo_loader, options, versions, write_json
from numpy.typing import NDArray

Rows = NDArray[np.uint16]
Verdicts = NDArray[np.bool_]

UNUSED_TOKEN = 0x7FFFFFFF  # in the tail of a file, which no instance may hold


def import_maxtext(wheel: Path) -> tuple[Any, Any, str]:
    """Return MaxText's modules `olmo_data` and `olmo_data_grain`, imported by themselves, and its version."""
    for name in ("maxtext", "maxtext.input_pipeline"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = stub
    data, grain_data = (
        importlib.import_module(f"maxtext.input_pipeline.{name}") for name in ("olmo_data", "olmo_data_grain")
    )
    (found,) = (
        d.version for d in importlib.metadata.distributions(path=[str(wheel)]) if d.metadata["Name"] == "maxtext"
    )
    return data, grain_data, found


def olmo_dataset(paths: list[Path], length: int, dtype: Any, instance_filter: Any = None) -> Any:
    from olmo_core.data import NumpyFSLDataset

    named = {"pad_token_id": 0, "eos_token_id": 0, "vocab_size": 2**31, "instance_filter_config": instance_filter}
    return NumpyFSLDataset(*map(str, paths), sequence_length=length, dtype=dtype, **named)


class OrderCase(NamedTuple):
    """One small data set and one way to load it; `batch` counts instances."""

    file_tokens: tuple[int, ...]
    length: int
    batch: int
    ranks: int
    seed: int
    epoch: int


ORDER_CASES = (
    *(OrderCase((64,), 4, 4, ranks, 0, epoch) for ranks, epoch in ((1, 1), (2, 2))),  # one file, no remainder anywhere
    # Every file has a remainder, and the last batch would not be full.
    *(OrderCase((100, 37, 250), 8, 6, ranks, 34521, epoch) for ranks, epoch in ((3, 1), (3, 2), (2, 3))),
    # Files that are too short for an instance, one of them without any token.
    OrderCase((15, 160, 0, 7, 333, 15), 16, 4, 4, 34521, 1),
    OrderCase((0, 47, 129), 16, 5, 1, 7, 3),
    # More instances and more ranks.
    *(OrderCase((1000, 2003, 517), 10, batch, 8, 34521, epoch) for batch, epoch in ((16, 1), (24, 2))),
    OrderCase((1201, 2, 777, 1023), 8, 32, 4, 0, 1),
    OrderCase((1201, 2, 777, 1023), 8, 12, 3, 0, 3),
    OrderCase((2799,), 7, 48, 8, 123456789, 2),
    OrderCase((127, 128, 129), 32, 3, 3, 1, 1),  # files end one token before, at, and after the end of an instance
    OrderCase((19, 22), 1, 8, 2, 34521, 2),  # one instance a token: a batch is as many tokens as instances
    *(OrderCase((30, second), 5, 8, 2, 34521, 1) for second in (9, 13)),  # fewer instances than a batch, and as many
)


def write_order_files(case: OrderCase, folder: Path) -> tuple[list[Path], int]:
    """Write raw uint32 files in which every token of instance i is i; return their paths and the number of instances."""
    paths, first = [], 0
    for number, n_tokens in enumerate(case.file_tokens):
        instances = n_tokens // case.length
        tokens = np.full(n_tokens, UNUSED_TOKEN, dtype="<u4")
        tokens[: instances * case.length] = np.repeat(np.arange(first, first + instances), case.length)
        paths.append(folder / f"part-{number}.npy")
        tokens.tofile(paths[-1])
        first += instances
    return paths, first


def olmo_batches(case: OrderCase) -> dict[str, Any]:
    """Return all the batches of one epoch, as OLMo-core's loader yields them to each rank."""
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
            by_rank.append([])
            for batch in loader:
                indices = batch["index"].tolist()
                assert (batch["input_ids"].numpy() == np.array(indices)[:, None]).all()  # tokens are the index
                by_rank[-1].append(indices)
            assert len(by_rank[-1]) == loader.total_batches
            loader.reset()
    found = {"file_tokens": list(case.file_tokens), "L": case.length, "N": instances, "global_batch_size": case.batch}
    found |= {"ranks": case.ranks, "seed": case.seed, "epoch": case.epoch}
    return found | {"batches": [list(ranks) for ranks in zip(*by_rank, strict=True)]}


def order_digest(order: NDArray[Any], dtype: str) -> dict[str, Any]:
    digest = hashlib.sha256(order.astype(dtype).tobytes()).hexdigest()
    return {"sha256": digest, "first": order[:16].tolist(), "last": order[-16:].tolist()}


def olmo_order() -> dict[str, Any]:
    """Return what `olmo_order.json` holds."""
    large = []
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "tokens.npy"
        np.zeros(100_003, dtype="<u4").tofile(path)
        loader = olmo_loader(olmo_dataset([path], 1, np.uint32), Path(temp), batch=1, seed=34521)
        for epoch in (1, 2):
            loader.reshuffle(epoch=epoch)
            order = np.array(loader.get_global_indices())
            assert order.dtype == np.uint32 and order.shape == (100_003,)
            large.append({"N": 100_003, "seed": 34521, "epoch": epoch, **order_digest(order, "<u4")})
            loader.reset()
    return {
        "made_by": versions("ai2-olmo-core", "numpy", "python"),
        "about": "batches: [batch][rank] -> instance indices, of the whole epoch (epochs count "
        "from 1); large: sha256 of the global order as little-endian uint32",
        "cases": [olmo_batches(case) for case in ORDER_CASES],
        "large": large,
    }


# (total_instances, seed, epoch, shard_count); epochs count from 0.
SHARD_CASES = (
    *((16, 0, 0, 1), (16, 0, 1, 2), (17, 0, 0, 4)),
    *((100, 34521, 0, 3), (100, 34521, 1, 3), (100, 34521, 2, 8)),
    *((199, 7, 0, 8), (200, 7, 5, 5), (53, 123456789, 1000, 2)),
    *((5, 1, 0, 8), (1, 3, 0, 1)),  # the first has fewer instances than shards: every shard is empty
)


def maxtext_order(olmo_data_grain: Any, version: str) -> dict[str, Any]:
    """Return what `maxtext_order.json` holds."""

    def samplers(total: int, seed: int, count: int) -> list[Any]:
        sampler = olmo_data_grain.OlmoIndexSampler
        named = {"total_instances": total, "seed": seed, "shard_count": count}
        return [sampler(**named, shard_index=shard) for shard in range(count)]

    cases = []
    for total, seed, epoch, count in SHARD_CASES:
        shards = [each.shard_indices(seed=seed, epoch=epoch).tolist() for each in samplers(total, seed, count)]
        named = {"total_instances": total, "seed": seed, "epoch": epoch, "shard_count": count}
        cases.append({**named, "shards": shards})
    records: dict[str, Any] = {"total_instances": 47, "seed": 34521, "shard_count": 3, "epochs": 3}
    records["record_keys"] = [
        [int(each[i].record_key) for i in range(3 * each.num_local_instances_per_epoch)]
        for each in samplers(47, 34521, 3)
    ]
    large = {"total_instances": 100_003, "seed": 7, "epoch": 0}
    order = olmo_data_grain.OlmoIndexSampler(total_instances=100_003, seed=7).shuffled_global_indices(seed=7, epoch=0)
    return {
        "made_by": {"maxtext": version, **versions("grain", "numpy", "python")},
        "about": "shards: [shard_index] -> shard_indices(seed, epoch); record_keys: [shard_index] "
        "-> the keys of sampler[0], sampler[1], ... over three epochs; large: sha256 of "
        "shuffled_global_indices as little-endian int64; epochs count from 0",
        "cases": cases,
        "records": records,
        "large": large | order_digest(order, "<i8"),
    }


def write_maxtext_index(olmo_data: Any, path: Path) -> None:
    """Let MaxText write an index over three files that need not exist."""
    n_tokens = {"gs://bucket/a/part-0.npy": 1000, "gs://bucket/a/part-1.npy": 128, "gs://bucket/b/part-0.npy": 515}
    files = list(zip(n_tokens, ("a", "a", "b"), strict=True))
    named = {"tokenizer": "allenai/dolma3-tokenizer", "header_reader": lambda name: ("uint32", (n_tokens[name],))}
    olmo_data.build_index(files, 128, **named).save(str(path))


class RowMaker:
    """Maker of rows of `length` tokens with periodic spans planted in a random background. Each method adds one row, or none
    where the span does not fit."""

    def __init__(self, length: int, seed: int):
        self.length = length
        self.vocab_shares = {2: 0.42, 3: 0.36, 50: 0.19, 1000: 0.03}  # mostly small, which makes near misses
        self.rng = np.random.default_rng([seed, length])
        self.rows: list[Rows] = []

    def integer(self, low: int, high: int) -> int:
        """Return a random integer in [low, high]."""
        return int(self.rng.integers(low, high + 1))

    def background(self) -> tuple[int, Rows]:
        """Return a random vocabulary size and a random row of it."""
        vocab = int(self.rng.choice(list(self.vocab_shares), p=list(self.vocab_shares.values())))
        return vocab, self.rng.integers(0, vocab, self.length).astype(np.uint16)

    def pattern(self, period: int, vocab: int) -> Rows:
        """Return a random pattern that has no shorter period."""
        while True:
            word = self.rng.integers(0, vocab, period).astype(np.uint16)
            if not any(period % d == 0 and (word == np.tile(word[:d], period // d)).all() for d in range(1, period)):
                return word

    def change(self, row: Rows, at: int, unlike: int, vocab: int) -> None:
        """Set one token to a random one that is not `unlike`."""
        row[at] = (unlike + self.integer(1, vocab - 1)) % vocab

    def fill(self, row: Rows, start: int, stop: int, word: Rows, phase: int) -> None:
        """Make `row[start:stop]` periodic; `row[i]` is `word[(i - phase) % period]`."""
        row[start:stop] = word[(np.arange(start, stop) - phase) % len(word)]

    def bound(self, row: Rows, start: int, stop: int, period: int, vocab: int) -> None:
        """Change the tokens next to a periodic span so that it is exactly that long."""
        if start > 0:
            self.change(row, start - 1, int(row[start - 1 + period]), vocab)
        if stop < self.length:
            self.change(row, stop, int(row[stop - period]), vocab)

    def start(self, size: int, place: str) -> int:
        """Return where a span of `size` tokens begins at the "head", "tail" or "middle" of the row."""
        slack = self.length - size
        middle = self.integer(1, slack - 1) if place == "middle" and slack >= 2 else slack // 2
        return {"head": 0, "tail": slack, "middle": middle}[place]

    def add(self, row: Rows) -> None:
        """Keep a row, now and then with its tokens moved to the top of the uint16 range."""
        if self.rng.random() < 0.04:
            row = (np.uint16(65535) - row).astype(np.uint16)
        assert row.dtype == np.uint16 and row.shape == (self.length,)
        self.rows.append(row)

    def span(self, period: int, repeats: int, extra: int, place: str, exact: bool = True, broken: bool = False) -> None:
        """Add a span of `repeats` periods and `extra` tokens; `broken`: one of them changed."""
        size = period * repeats + extra
        if size > self.length:
            return
        vocab, row = self.background()
        start = self.start(size, place)
        self.fill(row, start, start + size, self.pattern(period, vocab), start)
        if exact:
            self.bound(row, start, start + size, period, vocab)
        if broken:
            at = self.integer(start, start + size - 1)
            self.change(row, at, int(row[at]), vocab)
        self.add(row)

    def two_spans(self, period: int, first: int, second: int) -> None:
        """Add two spans of the same pattern with one token between them."""
        size = period * (first + second) + 1
        if size > self.length:
            return
        vocab, row = self.background()
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
        """Add a periodic head and tail with the same pattern, each a number of periods long.

        `aligned`: the tail is in phase with the head when both count from the row's start, so that the last row of a reshape
        to (-1, period) equals the first as far as it goes. Otherwise the head goes on where the tail stops, as in a ring.
        """
        extra = self.integer(0, period - 1)
        of_head = extra if self.rng.random() < 0.5 else 0
        in_head, in_tail = head * period + of_head, tail * period + extra - of_head
        if in_head + in_tail > self.length - 1:
            return
        vocab, row = self.background()
        word = self.pattern(period, vocab)
        self.fill(row, 0, in_head, word, 0)
        stop = self.length - in_tail
        self.fill(row, stop, self.length, word, 0 if aligned else self.length % period)
        if in_tail >= period:
            self.bound(row, stop, self.length, period, vocab)
        if in_head >= period and in_head < stop - 1:
            self.bound(row, 0, in_head, period, vocab)
        self.add(row)


PLACES = ("head", "tail", "middle")


def filter_rows(length: int, n_rows: int, *, seed: int = 20240229, density: int = 1, small: bool = False) -> Rows:
    """Return at least `n_rows` rows; `small` adds spans of fewer repeats, for other limits."""
    make = RowMaker(length, seed)
    for period in range(1, 17):  # every period, number of repeats near the limit of 32, and place
        for repeats in range(29, 36):
            for place in PLACES:
                for extra in sorted({0, period - 1, make.integer(0, period - 1)}):
                    near = 30 <= repeats <= 33 and period <= 13
                    if density > 1 or near or not extra:
                        make.span(period, repeats, extra, place, exact=near or extra == 0)
            # One token of the span changed; the span next to chance tokens.
            for place in PLACES if density > 1 else (PLACES[make.integer(0, 2)],):
                if repeats >= 31:
                    make.span(period, repeats, make.integer(0, period - 1), place, broken=True)
            make.span(period, repeats, make.integer(0, period - 1), "middle", exact=False)
    for repeats in range(29, 36):  # constant spans, the only ones that are near the limit in the shortest rows
        for place in PLACES:
            for broken in (False, True):
                make.span(1, repeats, 0, place, exact=not broken, broken=broken)
    for period in range(1, 14):
        for _ in range(10 * density):
            make.two_spans(period, make.integer(16, 31), make.integer(16, 31))
        for aligned in (True, False):  # a head and a tail that would only together reach the limit, were the row a ring
            for long in range(28, 33):
                for short in sorted({1, make.integer(1, 4)}):
                    make.wrap(period, short, long, aligned=aligned)
                    make.wrap(period, long, short, aligned=aligned)
    if small:
        make.vocab_shares = {3: 0.1, 50: 0.6, 1000: 0.3}  # a background that seldom repeats by chance
        for period in range(1, 14):
            for place in PLACES:
                for repeats, extra, broken in (1, period - 1, 0), (2, period - 1, 0), (3, 0, 0), (3, period - 1, 1):
                    make.span(period, repeats, extra, place, broken=bool(broken))
            for repeats in (2, 4, 5, 6, 9, 10, 11):
                for place in PLACES:
                    extra = make.integer(0, period - 1)
                    make.span(period, repeats, extra, place, exact=make.rng.random() < 0.7)
            for repeats in (2, 3, 4, 9):
                make.wrap(period, 1, repeats, aligned=True)
                make.wrap(period, repeats, 1, aligned=True)
    for period in range(1, 17):  # periodic from the first to the last token
        vocab, row = make.background()
        make.fill(row, 0, length, make.pattern(period, vocab), 0)
        make.add(row)
    for token in (0, 1, 999, 65535):
        make.add(np.full(length, token, dtype=np.uint16))
    for _ in range(max(40, n_rows - len(make.rows))):
        make.add(make.background()[1])
    return np.stack(make.rows)


def olmo_verdicts(rows: Rows, max_period: int, max_count: int, min_period: int = 1) -> Verdicts:
    """Return the `instance_mask` of every row, read through OLMo-core's dataset from a token file."""
    from olmo_core.data.numpy_dataset import InstanceFilterConfig

    limits = {"repetition_max_period": max_period, "repetition_min_period": min_period}
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "rows.npy"
        rows.astype("<u2").tofile(path)
        instance_filter = InstanceFilterConfig(**limits, repetition_max_count=max_count)
        dataset = olmo_dataset([path], rows.shape[1], np.uint16, instance_filter)
        items = [dataset[i] for i in range(len(dataset))]
    assert (np.stack([item["input_ids"].numpy() for item in items]) == rows).all()
    return np.array([item["instance_mask"] for item in items], dtype=np.bool_)


def filter_groups() -> dict[int, Rows]:
    """Return the rows of `olmo_filter.npz` by their length."""
    sparse = {length: filter_rows(length, count) for length, count in ((512, 1400), (521, 650), (455, 450))}
    return sparse | {96: filter_rows(96, 400, density=2, small=True), 35: filter_rows(35, 200, density=2)}


def olmo_filter(olmo_data: Any, version: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of `olmo_filter.npz`."""
    made_by = {"maxtext": version, **versions("ai2-olmo-core", "numpy", "python")}
    arrays: dict[str, NDArray[Any]] = {"made_by": np.array(json.dumps(made_by))}
    groups = filter_groups()
    for length, rows in groups.items():
        arrays[f"rows_{length}"] = rows
        arrays[f"clean_{length}"] = olmo_verdicts(rows, 13, 32)
        verdicts = [olmo_data.is_clean_instance(row) for row in rows.astype(np.int64)]  # as OLMo-core has them
        arrays[f"maxtext_clean_{length}"] = np.array(verdicts, np.bool_)
    for name, limits in {"p5_c3": (5, 3), "p7_c10": (7, 10), "p13_min3_c5": (13, 5, 3)}.items():
        arrays[f"clean_96_{name}"] = olmo_verdicts(groups[96], *limits)
    for count in (2, 1):
        arrays[f"clean_96_p13_c{count}"] = olmo_verdicts(groups[96], 13, count)
    return arrays


def main() -> None:
    given = options("the golden files of OLMo-core's and MaxText's orders and filter", "--maxtext")
    olmo_data, olmo_data_grain, version = import_maxtext(given.maxtext)
    for name, found in {"olmo": olmo_order(), "maxtext": maxtext_order(olmo_data_grain, version)}.items():
        write_json(given.out / f"{name}_order.json", found, compact=found)
    write_maxtext_index(olmo_data, given.out / "maxtext_index.json")
    arrays = olmo_filter(olmo_data, version)
    np.savez_compressed(given.out / "olmo_filter.npz", **arrays)
    for name, array in arrays.items():
        print(name, array.shape, int(array.sum()) if array.dtype == np.bool_ else "")


if __name__ == "__main__":
    main()
