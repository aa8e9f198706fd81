"""Orders of many rows are files in the cache. One process makes each file once, and leaves no incomplete file."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import grain_sft
from grain_sft import IndexSampler
from grain_sft.errors import StorageError
from grain_sft.sampling.orders import exact, permute
from grain_sft.sampling.orders.order import cached_by_epoch
from grain_sft.storage import artifact

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
