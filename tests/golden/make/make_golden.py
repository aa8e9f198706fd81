"""Write golden files with the original OLMo-core and MaxText: `python make_golden.py --maxtext maxtext-wheel`.

olmo_order.json: batches that OLMo-core's `NumpyFSLDataLoader` yields to each rank, and digests of a larger global order.
maxtext_order.json: shards, and records over three epochs, of MaxText's `OlmoIndexSampler`.
maxtext/index.json: an index file as MaxText's `build_index(...).save(path)` writes it.
olmo_filter.npz: the rows of tokens that the file already has, and whether the repetition filters of OLMo-core
  (`instance_mask`) and of MaxText let each row pass.

Needed: ai2-olmo-core 3.0.0 (with torch, CPU build), grain 0.2.18, numpy 2.4.6, and MaxText 0.2.5 as an unpacked wheel
(pip download --no-deps maxtext==0.2.5; python -m zipfile -e maxtext-*.whl maxtext-wheel). They give the bytes
of the stored files.
"""

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
from making import GOLDEN, olmo_epoch, olmo_loader, olmo_windows, options, versions, write_json
from numpy.typing import NDArray

Rows = NDArray[np.uint16]
Verdicts = NDArray[np.bool_]

OTHER_LIMITS = {"p5_c3": (5, 3), "p7_c10": (7, 10), "p13_min3_c5": (13, 5, 3), "p13_c2": (13, 2), "p13_c1": (13, 1)}
"""Limits of further verdicts on the rows of 96 tokens: longest period, count and, if it is not 1, shortest period."""
UNUSED_TOKEN = 0x7FFFFFFF  # in the tail of a file, which no instance may hold


def import_maxtext(wheel: Path) -> tuple[Any, Any, str]:
    """Return MaxText's modules `olmo_data` and `olmo_data_grain`, imported without the rest of MaxText, and its version."""
    for name in ("maxtext", "maxtext.input_pipeline"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(wheel.joinpath(*name.split(".")))]
        sys.modules[name] = stub
    names = ("olmo_data", "olmo_data_grain")
    data, grain_data = (importlib.import_module(f"maxtext.input_pipeline.{name}") for name in names)
    (found,) = importlib.metadata.distributions(name="maxtext", path=[str(wheel)])
    return data, grain_data, found.version


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
    OrderCase((19, 22), 1, 8, 2, 34521, 2),  # each instance is one token, so a batch of 8 instances is 8 tokens
    *(OrderCase((30, second), 5, 8, 2, 34521, 1) for second in (9, 13)),  # 7 and 8 instances, batches of 8
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
        dataset = olmo_windows(paths, case.length, np.uint32)
        dataset.prepare()
        assert len(dataset) == instances
        by_rank: list[list[list[int]]] = []
        for rank in range(case.ranks):
            loader = olmo_loader(dataset, folder, batch=case.batch, seed=case.seed, ranks=case.ranks, rank=rank)
            batches = olmo_epoch(loader, case.epoch)
            for batch in batches:
                assert (batch["input_ids"] == batch["index"][:, None]).all()  # tokens are the index
            by_rank.append([batch["index"].tolist() for batch in batches])
    found = {"file_tokens": list(case.file_tokens), "L": case.length, "N": instances, "global_batch_size": case.batch}
    found |= {"ranks": case.ranks, "seed": case.seed, "epoch": case.epoch}
    return found | {"batches": [list(ranks) for ranks in zip(*by_rank, strict=True)]}


def order_digest(order: NDArray[Any], dtype: str) -> dict[str, Any]:
    digest = hashlib.sha256(order.astype(dtype).tobytes()).hexdigest()
    return {"sha256": digest, "first": order[:16].tolist(), "last": order[-16:].tolist()}


def olmo_order() -> dict[str, Any]:
    large = []
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "tokens.npy"
        np.zeros(100_003, dtype="<u4").tofile(path)
        loader = olmo_loader(olmo_windows([path], 1, np.uint32), Path(temp), batch=1, seed=34521)
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
        [int(each[i].record_key) for i in range(3 * each.num_local_instances_per_epoch)] for each in samplers(47, 34521, 3)
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
    path.parent.mkdir(parents=True, exist_ok=True)
    olmo_data.build_index(files, 128, **named).save(str(path))


def olmo_verdicts(rows: Rows, max_period: int, max_count: int, min_period: int = 1) -> Verdicts:
    """Return the `instance_mask` of every row, read through OLMo-core's dataset from a token file."""
    from olmo_core.data.numpy_dataset import InstanceFilterConfig

    limits = {"repetition_max_period": max_period, "repetition_min_period": min_period}
    with tempfile.TemporaryDirectory() as temp:
        path = Path(temp) / "rows.npy"
        rows.astype("<u2").tofile(path)
        instance_filter = InstanceFilterConfig(**limits, repetition_max_count=max_count)
        dataset = olmo_windows([path], rows.shape[1], np.uint16, instance_filter_config=instance_filter)
        items = [dataset[i] for i in range(len(dataset))]
    assert (np.stack([item["input_ids"].numpy() for item in items]) == rows).all()
    return np.array([item["instance_mask"] for item in items], dtype=np.bool_)


def olmo_filter(olmo_data: Any, version: str, rows_by_length: dict[int, Rows]) -> dict[str, NDArray[Any]]:
    made_by = {"maxtext": version, **versions("ai2-olmo-core", "numpy", "python")}
    arrays: dict[str, NDArray[Any]] = {"made_by": np.array(json.dumps(made_by))}
    for length, rows in rows_by_length.items():
        arrays[f"rows_{length}"] = rows
        arrays[f"clean_{length}"] = olmo_verdicts(rows, 13, 32)
        verdicts = [olmo_data.is_clean_instance(row) for row in rows.astype(np.int64)]  # int64, as in OLMo-core's rows
        arrays[f"maxtext_clean_{length}"] = np.array(verdicts, np.bool_)
    for name, limits in OTHER_LIMITS.items():
        arrays[f"clean_96_{name}"] = olmo_verdicts(rows_by_length[96], *limits)
    return arrays


if __name__ == "__main__":
    given = options("the golden files of OLMo-core's and MaxText's orders and filter", "--maxtext")
    olmo_data, olmo_data_grain, version = import_maxtext(given.maxtext)
    for name, found in {"olmo": olmo_order(), "maxtext": maxtext_order(olmo_data_grain, version)}.items():
        write_json(given.out / f"{name}_order.json", found, compact=found.keys())
    write_maxtext_index(olmo_data, given.out / "maxtext" / "index.json")
    with np.load(GOLDEN / "olmo_filter.npz") as kept:
        rows = {int(name.removeprefix("rows_")): kept[name] for name in kept.files if name.startswith("rows_")}
    arrays = olmo_filter(olmo_data, version, rows)
    np.savez_compressed(given.out / "olmo_filter.npz", **arrays)
    for name, array in arrays.items():
        print(name, array.shape, int(array.sum()) if array.dtype == np.bool_ else "")
