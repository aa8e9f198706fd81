"""Exact orders on disk: made once, by one process, whole or not at all."""

import hashlib
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest

from grain_sft import IndexSampler
from grain_sft.errors import StorageError
from grain_sft.sampling.orders import permute, stored
from grain_sft.storage import artifact

ROWS = stored.IN_MEMORY_ROWS


def load(folder, epoch=1):
    depends = {"orders": 1, "order": "olmo", "rows": ROWS, "seed": 3, "epoch": epoch}
    return stored.load_permutation(depends, ("PCG64", 3 + epoch + 1), folder)


def olmo(num_rows, seed, epoch):
    return permute.permutation(num_rows, "PCG64", seed + epoch + 1)


def digest_of_an_order(folder):
    found = load(folder)
    return hashlib.sha256(found.tobytes()).hexdigest(), type(found).__name__, os.getpid()


def test_an_order_on_disk_is_the_one_made_in_memory(tmp_path):
    found = load(tmp_path)
    assert isinstance(found, np.memmap)
    np.testing.assert_array_equal(found, olmo(ROWS, 3, 1))
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".arrays", ".lock"]


def test_many_processes_that_start_at_once_make_it_once(tmp_path):
    with ProcessPoolExecutor(4, multiprocessing.get_context("spawn")) as pool:
        results = list(pool.map(digest_of_an_order, [tmp_path] * 8))
    assert {digest for digest, _, _ in results} == {hashlib.sha256(olmo(ROWS, 3, 1).tobytes()).hexdigest()}
    assert {kind for _, kind, _ in results} == {"memmap"}
    (made,) = tmp_path.glob("*.arrays")
    before = made.stat().st_mtime_ns
    digest_of_an_order(tmp_path)
    assert made.stat().st_mtime_ns == before
    assert not list(tmp_path.glob("*.tmp"))


def other(kind="olmo", rows=ROWS, seed=3, epoch=1, values=None):
    """An order's file under a checksum that is right."""
    depends = {"orders": 1, "order": kind, "rows": rows, "seed": seed, "epoch": epoch}
    return depends, {"rows": olmo(ROWS, seed, epoch) if values is None else values}


def test_a_damaged_order_is_made_again(tmp_path):
    """Also where 100,000 rows of it are zeros, or it is the order of another seed."""
    made, expected = tmp_path / f"olmo-{ROWS}-3-1.arrays", olmo(ROWS, 3, 1)
    load(tmp_path)
    whole = made.read_bytes()
    middle = len(whole) // 2
    damages = (
        b"",
        whole[:16],
        b"no header at all" * 10,
        whole[:-64],
        whole[:middle] + bytes(400_000) + whole[middle + 400_000 :],
        whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    )
    for damage in damages:
        made.write_bytes(damage)
        np.testing.assert_array_equal(load(tmp_path), expected, str(len(damage)))
        assert made.read_bytes() == whole
    values = np.zeros(ROWS), expected[:-1]
    for depends, arrays in (other(seed=4), other(epoch=0), other("maxtext"), *(other(values=each) for each in values)):
        artifact.save(made, depends, arrays)
        np.testing.assert_array_equal(load(tmp_path), expected)
        assert made.read_bytes() == whole
    artifact.save(made, *other())
    assert made.read_bytes() == whole  # so what the maker writes is what `artifact` would


def test_a_folder_that_is_a_file_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match=r"file.*GRAIN_SFT_CACHE_DIR"):
        load(blocked / "orders")


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path):
    """A real write error: the process may write files of 1 MB only."""
    program = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "from grain_sft.errors import StorageError\n"
        "from grain_sft import IndexSampler\n"
        "try:\n"
        f"    IndexSampler({ROWS}, global_batch_size=8, seed=3, order='olmo', cache_dir=sys.argv[1]).rows(0)\n"
        "except StorageError as error:\n"
        "    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert "could not be made" in result.stdout, result.stderr
    assert str(tmp_path) in result.stdout
    assert not list(tmp_path.glob("*.arrays*"))


def test_the_sampler_keeps_orders_where_it_is_told_to(tmp_path, monkeypatch):
    options = {"global_batch_size": 16, "seed": 5}
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "b"))
    for cache_dir, folder in ((tmp_path / "a", tmp_path / "a"), (None, tmp_path / "b" / "orders")):
        rows = IndexSampler(ROWS, order="olmo", cache_dir=cache_dir, **options).rows(0)
        np.testing.assert_array_equal(rows, olmo(ROWS, 5, 0)[:16])
        assert list(folder.glob("olmo-*.arrays"))
