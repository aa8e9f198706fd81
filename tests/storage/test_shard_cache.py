"""The shard cache stays below its bound and never mixes versions. Processes share it. Damaged blocks are fetched again."""

import contextlib
import itertools
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest
from failing_proxy import before_emulator, media_bytes

import grain_sft
from grain_sft.storage import CacheOptions

LENGTH = 1024
TOKENS = 64 * LENGTH  # tokens of a shard, which are 256 KiB
SHARDS = 6
UNIT = 32 << 10  # bytes of a block
URL, INDEX, MEMORY = "gs://bucket/cached/", "gs://bucket/cached/index.json", "memory://cached/"

READER = """
import sys, numpy as np
from grain_sft.corpus import open_corpus
from grain_sft.storage.shard_reader import ShardReader
url, folder, bound, unit, seed, rows = sys.argv[1:]
corpus = open_corpus(url, remote={"cache": {"folder": folder, "max_bytes": bound, "unit": unit}})
reader = ShardReader(corpus.shards, 4, remote=corpus.remote)
print("ready", flush=True)
sys.stdin.readline()
order = np.random.default_rng(int(seed)).permutation(corpus.num_tokens // 1024)[: int(rows)]
for batch in np.split(order, len(order) // 8):
    out = np.empty((8, 1024), np.uint32)
    shards, first = np.divmod(batch * 1024, 65536)
    reader.gather(shards.tolist(), first.tolist(), list(range(0, 32768, 4096)), [4096] * 8, out.data.cast("B"))
    assert (out == np.arange(1024) + batch[:, None] * 1024).all(), batch
print(len(order), flush=True)
"""
"""Program that prints "ready", waits for a line, and reads and checks random rows through a cache."""


def tokens(shard):
    return np.arange(shard * TOKENS, (shard + 1) * TOKENS, dtype=np.uint32)


@pytest.fixture(scope="module")
def proxy(client):
    """A proxy before the emulated bucket, which holds the shards."""
    client.pipe({f"bucket/cached/{shard}.npy": tokens(shard).tobytes() for shard in range(SHARDS)})
    with before_emulator() as proxy, pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSSPEC_GS_TOKEN", "anon")  # without it, each process searches for credentials for seconds
        grain_sft.open_corpus(URL).save(INDEX)
        yield proxy


@pytest.fixture
def memory():
    """fsspec's file system in memory, which holds the same shards as the bucket."""
    client = fsspec.filesystem("memory")
    client.pipe({f"/cached/{shard}.npy": tokens(shard).tobytes() for shard in range(SHARDS)})
    yield client
    client.rm("/cached", recursive=True)


def source(url, folder, bound="64MiB", unit=UNIT, **options):
    """Return a source of windows of the shards at `url`, read through a cache in `folder` of at most `bound` bytes."""
    cache = {"folder": str(folder), "max_bytes": bound, "unit": unit}
    corpus = grain_sft.open_corpus(url, remote={"cache": cache, **options})
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH))


def assert_rows(mine, rows):
    expected = np.arange(SHARDS * TOKENS, dtype=np.uint32).reshape(-1, LENGTH)
    np.testing.assert_array_equal(mine.read(rows)["tokens"], expected[rows])


def cached(folder, suffix=""):
    """Return the files of blocks in a cache. While a block is fetched, its file has the suffix `.part`."""
    return sorted(path for path in folder.rglob(f"*{suffix}") if path.is_file() and path.name != "space")


def sizes_of(folder):
    """Return the size in bytes of each file below `folder`, by path and inode. A folder has 0 bytes."""
    found = {}
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found[path, path.stat().st_ino] = 0 if path.is_dir() else path.stat().st_size
    return found


def size_of(folder):
    """Return the total size of all files, in bytes, or None if it can't be determined.

    Other processes may change files while they are listed. So two consecutive listings, out of up to 20, must be equal.
    """
    for before, after in itertools.pairwise(sizes_of(folder) for _ in range(20)):
        if before == after:
            return sum(after.values())
    return None


def start(folder, bound, unit, seed, rows):
    arguments = [INDEX, str(folder), str(bound), str(unit), str(seed), str(rows)]
    return subprocess.Popen([sys.executable, "-c", READER, *arguments], stdin=-1, stdout=-1, text=True)


def go(processes, before=lambda: None):
    """Wait until all `processes` are ready, call `before`, and make them read."""
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    before()
    for process in processes:
        print(file=process.stdin, flush=True)


@pytest.mark.parametrize("unit", [UNIT, 100_000, "shard"])
def test_rows_are_those_of_the_bucket_and_are_fetched_once(proxy, tmp_path, unit):
    mine = source(URL, tmp_path, unit=unit)
    every = np.random.default_rng(0).permutation(len(mine))
    proxy.clear()
    for start in range(0, len(every), 16):
        assert_rows(mine, every[start : start + 16])
    assert media_bytes(proxy) == (SHARDS * TOKENS * 4,) * 2
    again = source(INDEX, tmp_path, unit=unit)
    proxy.clear()
    assert_rows(again, every)
    assert not proxy.requests["media"]


def test_environment_variables_set_up_a_cache(proxy, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_SHARD_CACHE", str(tmp_path))
    layout = grain_sft.WindowLayout(grain_sft.open_corpus(URL), LENGTH)
    with pytest.raises(grain_sft.GrainSftError, match=r"\$GRAIN_SFT_SHARD_CACHE_BYTES"):
        grain_sft.NpyDataSource(layout)
    monkeypatch.setenv("GRAIN_SFT_SHARD_CACHE_BYTES", "1GiB")
    monkeypatch.setenv("GRAIN_SFT_SHARD_CACHE_UNIT", "shard")
    assert_rows(grain_sft.NpyDataSource(layout), [0, 1])
    assert len(cached(tmp_path)) == 1
    options = CacheOptions(tmp_path, "1GiB")
    assert options.folder == str(tmp_path)  # a Path, as well as text
    assert grain_sft.open_corpus(URL, remote={"cache": options}).remote.cache == options
    with pytest.raises(grain_sft.GrainSftError, match="cache: folder is None"):
        CacheOptions(None, "1GiB")


DAMAGES = {
    "a bit": lambda data, other: data[:-100] + bytes([data[-100] ^ 4]) + data[-99:],
    "a checksum": lambda data, other: data[:65] + bytes([data[65] ^ 4]) + data[66:],
    "cut": lambda data, other: data[:-5000],
    "cut in a checksum": lambda data, other: data[:66],
    "emptied": lambda data, other: b"",
    "swapped": lambda data, other: other,
}
"""Functions that return damaged bytes of a file of the cache, from its bytes and those of another file."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_fetched_again(memory, tmp_path, damage):
    mine = source(MEMORY, tmp_path)
    assert_rows(mine, list(range(len(mine))))
    paths = cached(tmp_path)
    whole = [path.read_bytes() for path in paths]
    for path, data, other in zip(paths, whole, whole[1:] + whole[:1], strict=True):
        (tmp_path / "new").write_bytes(DAMAGES[damage](data, other))
        (tmp_path / "new").rename(path)
    assert_rows(mine, list(range(len(mine))))
    assert_rows(source(MEMORY, tmp_path), list(range(len(mine))))


def test_a_block_that_can_not_be_opened_is_read_from_the_bucket_without_a_wait(memory, tmp_path):
    assert_rows(source(MEMORY, tmp_path), [0])
    for path in cached(tmp_path):
        path.unlink()
        path.mkdir()
    assert_rows(source(MEMORY, tmp_path, seconds=1000), [0])  # a wait of 1,000 s would time out the test


def test_the_least_recently_used_blocks_are_deleted_to_make_room(memory, tmp_path):
    bound = 10 * (UNIT + 128) + 4096
    mine = source(MEMORY, tmp_path, bound=bound)
    # Shard 0 has blocks 0 to 7. The first read of shard 2 gets its first block, 16, and its last one.
    for block in (*range(8), 0, 16, 17):
        assert_rows(mine, [block * UNIT // 4 // LENGTH])
        time.sleep(0.02)  # longer than a tick of the clock of the file system
    kept = [int(path.name.split("-")[1]) // UNIT for path in cached(tmp_path)]  # numbers of blocks in their shards
    assert (kept.count(0), kept.count(1)) == (2, 1)  # without block 1 of shard 0, which was unused for longest
    assert len(kept) in (9, 10) and size_of(tmp_path) <= bound


def test_files_of_other_programs_in_the_folder_are_left_alone(memory, tmp_path):
    others = tmp_path / "mine.npy", tmp_path / "blocks" / "ab" / "mine.npy"
    others[1].parent.mkdir(parents=True)
    for path in others:
        path.write_bytes(bytes(1 << 20))
    assert_rows(source(MEMORY, tmp_path, bound=3 * UNIT), list(range(0, SHARDS * TOKENS // LENGTH, 7)))
    assert all(path.exists() for path in others)


@pytest.mark.parametrize("root", ["gs://bucket", "memory:/"])
def test_versions_of_an_object_are_never_mixed(client, proxy, memory, tmp_path, root):
    """Objects of a bucket have generations. Files in memory have none, so the cache checks the version with each block."""
    store, path = memory if root == "memory:/" else client, f"{root}/versions/0.npy"
    store.pipe_file(path, tokens(0).tobytes())
    first = source(path, tmp_path)
    assert_rows(first, [0])
    other = tokens(0)
    other[2 * LENGTH : -2 * LENGTH] += 7  # the size and the first and last tokens stay the same
    store.pipe_file(path, other.tobytes())
    for mine in (first, grain_sft.NpyDataSource(grain_sft.WindowLayout(first.layout.corpus, LENGTH))):
        assert_rows(mine, [0])  # the cached blocks are of the version that was opened
        with pytest.raises(grain_sft.GrainSftError, match=r"versions/0.npy: .* is gone: it was replaced"):
            mine.read([40])
    np.testing.assert_array_equal(source(path, tmp_path).read(range(64))["tokens"].reshape(-1), other)
    store.rm(path)


def test_processes_that_start_together_fetch_each_byte_once(proxy, tmp_path):
    processes = [start(tmp_path, "1GiB", UNIT, seed, SHARDS * 64) for seed in range(3)]
    go(processes, lambda: (proxy.clear(), setattr(proxy, "latency", 0.005)))  # slow, so that they overlap
    assert [process.communicate()[0] for process in processes] == [f"{SHARDS * 64}\n"] * 3
    proxy.latency = 0
    assert media_bytes(proxy) == (SHARDS * TOKENS * 4,) * 2


@pytest.mark.parametrize("unit", [UNIT, pytest.param("shard", marks=pytest.mark.heavy)])
def test_a_cache_for_a_third_of_the_corpus_never_exceeds_its_bound(proxy, tmp_path, unit):
    bound = SHARDS * TOKENS * 4 // 3 + 8192
    processes = [start(tmp_path, bound, unit, seed, 96) for seed in range(3)]
    go(processes)
    sizes = []
    while any(process.poll() is None for process in processes):
        sizes.append(size_of(tmp_path) or 0)
        time.sleep(0.001)
    assert [process.communicate()[0] for process in processes] == ["96\n"] * 3
    assert 0.5 * bound < max(sizes) <= bound
    assert not cached(tmp_path, ".part")


def test_processes_that_are_killed_leave_a_cache_that_works(proxy, tmp_path):
    bound = SHARDS * TOKENS * 4 // 3 + 4096
    proxy.latency, parts = 0.01, 0
    for seed in range(2):
        process = start(tmp_path, bound, "shard" if seed % 2 else UNIT, seed, SHARDS * 64)
        go([process])
        until = time.monotonic() + 60
        while not cached(tmp_path, ".part") and time.monotonic() < until:
            time.sleep(0.001)
        process.kill()
        process.communicate()
        parts += len(cached(tmp_path, ".part"))
        assert size_of(tmp_path) <= bound
    proxy.latency = 0
    mine = source(URL, tmp_path, bound=bound)
    for row in range(0, len(mine), 32):
        assert_rows(mine, list(range(row, row + 32)))
        assert size_of(tmp_path) <= bound
    assert not cached(tmp_path, ".part")
    assert parts


def test_a_process_that_hangs_while_it_fetches_a_block_does_not_hang_the_others(proxy, tmp_path):
    assert_rows(source(INDEX, tmp_path), [0])
    block = next(path for path in cached(tmp_path) if "-0-" in path.name)
    block.rename(f"{block}.part")
    # the time of the last write lies in the future, as if the clock had been set back
    holder = subprocess.Popen(["flock", f"{block}.part", "sh", "-c", f"touch -d '1 hour' {block}.part; sleep 60"])
    time.sleep(0.2)
    begin = time.monotonic()
    assert_rows(source(INDEX, tmp_path, seconds=0.5), [0, 1])
    assert time.monotonic() - begin < 40  # the holder sleeps for 60
    holder.kill()
    holder.wait()


@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/null"])
def test_rows_come_from_the_bucket_if_the_folder_can_not_be_written_to(memory, folder, caplog):
    assert_rows(source(MEMORY, folder), [5, 300, 17])
    assert "can't be written to" in caplog.text and "read from the bucket" in caplog.text


def test_rows_come_from_the_bucket_if_the_disk_is_full(memory, tmp_path, caplog, small_files):
    mine = source(MEMORY, tmp_path, unit="shard")
    small_files(50_000)
    assert_rows(mine, [5, 300, 17])
    small_files(None)
    assert "can't be written to" in caplog.text
    assert size_of(tmp_path) <= 4096
    assert_rows(mine, [5, 300, 17])
    assert len(cached(tmp_path)) == 2
