"""Orders have exactly the rows that other systems computed. Order `shuffle` is Grain's, but repeats no row.

Orders of many rows are files in the cache. One process makes each file once, and leaves no incomplete file.
"""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import grain
import numpy as np
import pytest
from batches import golden_values
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_sft
from grain_sft import Host, IndexSampler
from grain_sft.errors import SamplerError, StorageError
from grain_sft.sampling import ORDERS
from grain_sft.sampling.orders import exact, permute
from grain_sft.sampling.orders.index_shuffle import permuted
from grain_sft.sampling.orders.order import cached_by_epoch
from grain_sft.storage import artifact

NAMES = ("episode_batches", "olmo_order", "maxtext_order", "openchat_order")
EPISODES, OLMO, MAXTEXT, OPENCHAT = (golden_values(f"{name}.json") for name in NAMES)


def sampler(rows, batch, order, host=Host(0, 1), **options):
    return IndexSampler(rows, global_batch_size=batch, order=order, host=host, **options)


def order(name, rows, seed, epoch):
    return ORDERS[name].make(rows, seed=seed, cache_dir=None)(epoch, np.arange(rows))


@pytest.mark.parametrize("case", OLMO["cases"])
def test_order_olmo_is_the_order_of_olmo_core(case):
    if not case["batches"]:
        with pytest.raises(SamplerError, match=r"no full step|expected an integer"):
            sampler(case["N"], case["global_batch_size"], "olmo", seed=case["seed"])
        return
    for rank in range(case["ranks"]):
        mine = sampler(case["N"], case["global_batch_size"], "olmo", Host(rank, case["ranks"]), seed=case["seed"])
        assert mine.steps_per_epoch == len(case["batches"])
        first = (case["epoch"] - 1) * mine.steps_per_epoch
        for number, batch in enumerate(case["batches"]):
            assert mine.rows(first + number).tolist() == batch[rank]


@pytest.mark.parametrize("case", MAXTEXT["cases"])
def test_order_maxtext_is_the_order_of_maxtext(case):
    hosts, total, shards = case["shard_count"], case["total_instances"], case["shards"]
    assert len(shards) == hosts
    if not all(shards):
        with pytest.raises(SamplerError):
            sampler(total, hosts, "maxtext", Host(0, hosts), seed=case["seed"])
        return
    for index, shard in enumerate(shards):
        mine = sampler(total, hosts, "maxtext", Host(index, hosts), seed=case["seed"])
        first = case["epoch"] * len(shard)
        assert [int(mine.rows(first + i)[0]) for i in range(len(shard))] == shard


def test_order_maxtext_runs_on_across_epochs_as_maxtext_does():
    records, hosts = MAXTEXT["records"], MAXTEXT["records"]["shard_count"]
    for index, keys in enumerate(records["record_keys"]):
        mine = sampler(records["total_instances"], hosts * 4, "maxtext", Host(index, hosts), seed=records["seed"])
        assert [mine[i].record_key for i in range(len(keys))] == keys
        straddling = np.concatenate([mine.rows(step) for step in range(len(keys) // 4)])
        assert straddling.tolist() == keys[: len(straddling)]


def test_large_permutations_are_those_of_olmo_core_and_maxtext():
    assert [permute.row_dtype(rows) for rows in (1 << 32, (1 << 32) + 1)] == [np.uint32, np.uint64]
    for large in OLMO["large"]:
        rows = order("olmo", large["N"], large["seed"], large["epoch"] - 1)
        assert hashlib.sha256(rows.astype("<u4").tobytes()).hexdigest() == large["sha256"]
    large = MAXTEXT["large"]
    rows = order("maxtext", large["total_instances"], large["seed"], large["epoch"])
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == large["sha256"]


@pytest.mark.parametrize("case", EPISODES["cases"], ids=lambda case: f"{case['episodes']} episodes")
def test_order_episode_is_the_order_of_the_episode_indexed_loader(case):
    mine = sampler(case["episodes"], case["batch_size"], "episode", seed=case["epoch_seed"], last_batch="run_on")
    assert [mine.rows(step).tolist() for step in range(len(case["batches"]))] == case["batches"]
    epochs = sampler(case["episodes"], case["episodes"], "episode", seed=case["epoch_seed"])
    for epoch, first in enumerate(case["first_episode_ids"]):
        assert epochs.rows(epoch)[:10].tolist() == first


@pytest.mark.parametrize("case", OPENCHAT["cases"])
def test_order_openchat_is_the_order_of_openchats_sampler(case):
    mine = sampler(case["documents"], case["documents"], "openchat", seed=case["seed"])
    for epoch, expected in enumerate(case["epochs"]):
        rows = mine.rows(epoch)
        assert rows[:10].tolist() == expected["first"]
        assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == expected["sha256"]


BROKEN = [(1 << bits) + 1 for bits in range(16, 50, 2)]  # numbers of rows for which Grain repeats a row
NUMBERS_OF_ROWS = st.integers(1 << 16, 1 << 50).filter(lambda rows: rows not in BROKEN)


@settings(max_examples=60)
@given(NUMBERS_OF_ROWS, st.integers(0, (1 << 32) - 1), st.integers(0))
def test_many_indices_are_permuted_as_grain_permutes_each(rows, key, seed):
    indices = np.append(np.random.default_rng(seed).integers(0, rows, 600), [0, rows - 1])
    expected = [index_shuffle(index, rows - 1, key, 8) for index in indices.tolist()]
    np.testing.assert_array_equal(permuted(indices, rows, key, 8), expected)
    np.testing.assert_array_equal(permuted(indices[-20:], rows, key, 8), expected[-20:])


@pytest.mark.parametrize("rows", [1 << 16, (1 << 16) + 1, (1 << 16) + 2, (1 << 17) + 1, 99_999])
def test_each_row_is_read_once_an_epoch(rows):
    (stream,) = grain_sft.IndexSampler(rows, global_batch_size=1, seed=5).streams
    found = stream.rows_at(3, np.arange(rows))
    np.testing.assert_array_equal(np.sort(found), np.arange(rows))
    for index in (0, 1, rows // 2, rows - 2, rows - 1):
        assert stream.rows_at(3, np.array([index])) == found[index]


def test_grain_repeats_a_row_of_65537():
    assert index_shuffle(65536, 65536, 9, 8) == index_shuffle(0, 65536, 9, 8)  # if this fails, remove our correction


@pytest.mark.parametrize("rows", [1, 3, 700, 16_384, 16_385, 70_001])
def test_order_grain_is_the_order_of_grains_shuffle(rows):
    seed, epochs = 2**32 - 2, 4
    dataset = grain.MapDataset.range(rows).shuffle(seed).repeat(epochs)
    (stream,) = grain_sft.IndexSampler(rows, global_batch_size=1, seed=seed, order="grain").streams
    for epoch in range(epochs):
        indices = np.unique(np.linspace(0, rows - 1, 550).astype(np.int64))
        expected = [dataset[epoch * rows + index] for index in indices.tolist()]
        np.testing.assert_array_equal(stream.rows_at(epoch, indices), expected)
        np.testing.assert_array_equal(stream.rows_at(epoch, indices[-3:]), expected[-3:])


@pytest.mark.parametrize(("rows", "seed", "message"), [(65_537, 0, "has one row twice"), (9, 2**32, "seeds below")])
def test_order_grain_refuses_what_grain_cannot_do(rows, seed, message):
    with pytest.raises(grain_sft.GrainSftError, match=message):
        grain_sft.IndexSampler(rows, global_batch_size=1, seed=seed, order="grain")


ROWS = exact.IN_MEMORY_ROWS


def depends(seed=3):
    """Return the values that identify an order's file."""
    return {"orders": 1, "order": "olmo", "rows": ROWS, "seed": seed, "epoch": 1}


def load(folder):
    return exact.load_permutation(depends(), ("PCG64", 5), folder)


def digest_of_an_order(folder):
    """Return the hash of an order and the name of its type, which is `memmap` for a file."""
    found = load(folder)
    return hashlib.sha256(found.tobytes()).hexdigest(), type(found).__name__


def test_concurrent_processes_make_an_order_once_and_it_equals_the_order_made_in_memory(tmp_path):
    expected = hashlib.sha256(permute.permutation(ROWS, "PCG64", 5).tobytes()).hexdigest(), "memmap"
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        assert set(pool.map(digest_of_an_order, [tmp_path] * 4)) == {expected}
    (made,) = tmp_path.glob("*.arrays")
    before = made.stat().st_mtime_ns
    assert digest_of_an_order(tmp_path) == expected and made.stat().st_mtime_ns == before
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".arrays", ".lock"]


def test_threads_that_begin_an_epoch_together_compute_its_order_once():
    made = []
    rows_at = cached_by_epoch(lambda epoch: made.append(epoch) or time.sleep(0.05) or np.arange(epoch, epoch + 9))
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(rows_at, [0, 0, 1, 1], [np.arange(2)] * 4)
        assert np.ravel([*found]).tolist() == [0, 1, 0, 1, 1, 2, 1, 2] and sorted(made) == [0, 1]


def test_the_process_that_makes_an_order_finds_the_packages_of_its_parent(tmp_path):
    """The parent finds the package only in its working directory, like a notebook in a checkout."""
    (tmp_path / "grain_sft").symlink_to(Path(grain_sft.__file__).parent)
    program = f"""if True:
        from pathlib import Path
        from grain_sft.sampling.orders import exact
        exact._write(Path("order"), {depends()}, ("PCG64", 5))"""
    # The .pth files in this folder, such as one for grain_sft, are not read.
    packages = {**os.environ, "PYTHONPATH": str(Path(np.__file__).parents[1])}
    subprocess.run([sys._base_executable, "-c", program], cwd=tmp_path, env=packages, check=True)
    assert (tmp_path / "order").exists()


def test_a_file_with_an_order_of_another_seed_dtype_or_length_is_made_again(tmp_path):
    """The wrong files have right checksums. For damaged files see tests/hardening/test_caches.py."""
    made, expected = tmp_path / f"olmo-{ROWS}-3-1.arrays", permute.permutation(ROWS, "PCG64", 5)
    load(tmp_path)
    whole = made.read_bytes()
    for other, rows in (depends(seed=4), expected), (depends(), np.zeros(ROWS)), (depends(), expected[:-1]):
        artifact.save(made, other, {"rows": rows})
        np.testing.assert_array_equal(load(tmp_path), expected)
        assert made.read_bytes() == whole


def test_orders_are_in_the_given_folder_or_the_cache_and_a_file_in_its_place_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "b"))
    for cache_dir, folder in ((tmp_path / "a", tmp_path / "a"), (None, tmp_path / "b" / "orders")):
        rows = IndexSampler(ROWS, order="olmo", cache_dir=cache_dir, global_batch_size=16, seed=5).rows(0)
        np.testing.assert_array_equal(rows, permute.permutation(ROWS, "PCG64", 6)[:16])
        assert list(folder.glob("olmo-*.arrays"))
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file.*GRAIN_SFT_CACHE_DIR"):
        load(tmp_path / "file" / "orders")
