"""If a bucket fails, a read from it returns the right bytes, or raises an error in time.

The bucket is an emulator. The real gcsfs client reaches it through a proxy, which refuses, cuts, resets and delays requests.
"""

import time

import numpy as np
import pytest
from failing_proxy import before_emulator

import grain_sft
from grain_sft.errors import CorpusError, StorageError, WrongTypeError
from grain_sft.storage import files, remote_files
from grain_sft.storage.remote.retries import Limits

LENGTH = 512
SHARDS = 4
TOKENS = np.random.default_rng(0).integers(0, 50_000, (SHARDS, 64, LENGTH), dtype=np.uint32)
ROWS = TOKENS.reshape(-1, LENGTH)
BUCKET = "gs://bucket/rows/"


@pytest.fixture(scope="module")
def module_proxy(client):
    client.pipe({f"bucket/rows/{shard}.npy": TOKENS[shard].tobytes() for shard in range(SHARDS)})
    with before_emulator() as proxy:
        yield proxy


@pytest.fixture
def proxy(module_proxy):
    """The proxy, without failures until a test sets them."""
    module_proxy.heal()
    return module_proxy


def source(**options):
    corpus = grain_sft.open_corpus(BUCKET, dtype="uint32", **options)
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH))


@pytest.mark.parametrize(("delay", "batches"), [(0.2, 8), pytest.param(1.0, 300, marks=pytest.mark.heavy)])
def test_every_byte_is_right_although_some_requests_fail_and_some_are_late(proxy, delay, batches):
    proxy.refused, proxy.cut, proxy.reset, proxy.slow, proxy.delay = 0.05, 0.02, 0.01, 0.02, delay
    generator = np.random.default_rng(7)
    while set(proxy.failures) != {"refused", "cut", "reset"}:  # until each kind of failure has occurred
        mine = source()
        for _ in range(batches):
            chosen = generator.integers(0, len(mine), 16)
            np.testing.assert_array_equal(mine.read(chosen)["tokens"], ROWS[chosen])


REASONS = {
    "refused": "Try later",
    "cut": "(a body of|breaks off|not completed|payload)",
    "reset": "(reset|disconnected|Disconnected)",
    "silent": "no answer in time",
}


@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_the_object_is_named_within_the_stated_time_if_all_requests_fail(proxy, kind, reason):
    mine = source(remote={"seconds": 1})
    mine.read([0, 70])  # rows of two shards; the first read checks the files
    setattr(proxy, kind, 1.0)
    begin = time.monotonic()
    with pytest.raises(grain_sft.GrainSftError) as error:
        mine.read([1, 71])
    assert time.monotonic() - begin < 30  # the default limit is minutes
    last = f"({reason}|no answer in time)"  # on a busy machine, the last request of any kind may time out
    assert error.match(rf"gs://bucket/rows/[01].npy: bytes \d+ to \d+ can't be read: \d+ request.*{last}")
    assert "GRAIN_SFT_REMOTE_SECONDS" in str(error.value) and isinstance(error.value, OSError)
    setattr(proxy, kind, 0)
    np.testing.assert_array_equal(mine.read([1, 71])["tokens"], ROWS[[1, 71]])


@pytest.mark.parametrize("where", ["rows/", "rows/0.npy", "rows/*.npy", "rows/index.json", "new"])
def test_opening_and_writing_end_within_the_stated_time_if_all_requests_fail(proxy, monkeypatch, where):
    monkeypatch.setenv("GRAIN_SFT_REMOTE_SECONDS", "0.5")
    proxy.refused, proxy.silent = 1.0, where == "new"
    path = where.rstrip("/").replace("*", ".")
    last = "(Try later|no answer in time)"  # on a busy machine, the last request may time out
    begin = time.monotonic()
    with pytest.raises(grain_sft.GrainSftError, match=f"gs://bucket/{path}.*{last}"):
        files.write_bytes("gs://bucket/new", b"") if proxy.silent else grain_sft.open_corpus(f"gs://bucket/{where}")
    assert time.monotonic() - begin < 30  # the default limit is minutes


def test_a_missing_file_is_requested_once(proxy):
    with pytest.raises(grain_sft.GrainSftError, match="no such file"):
        files.read_range("gs://bucket/none.npy", 0, 8)
    assert [count for path, count in proxy.paths.items() if "none.npy" in path] == [1]


def test_requests_are_concurrent_up_to_the_stated_number(proxy):
    proxy.latency = 0.05
    for options, most in (({"requests": 3}, 3), ({}, 20)):
        mine = source(remote=options)
        mine.read(range(20))
        proxy.clear()
        mine.read(range(20))
        assert proxy.requests["media"] == 20 and 1 < proxy.most_at_once <= most


def test_a_long_range_is_read_in_parts_and_returned_whole(proxy, client):
    data = np.random.default_rng(0).bytes(2 * remote_files.PART_BYTES + 12345)
    client.pipe_file("bucket/long.bin", data)
    proxy.clear()
    assert files.read_range("gs://bucket/long.bin", 5, len(data)) == data[5:]
    assert proxy.requests["media"] == 3


WRONG_OPTIONS = [
    ({"seconds": 0}, "finite numbers above 0"),
    ({"requests": 2.5}, "requests is 2.5"),
    ({"second": 3}, "remote: unknown key 'second'"),
    (5, "remote is 5"),
    ({"cache": {"x": 1}}, "remote: cache: unknown key 'x'"),
    ({"cache": "/tmp/x"}, "expected a section with folder, max_bytes"),
    ({"cache": {"folder": "x", "max_bytes": "\u0663GB"}}, "expected bytes, such as"),
    ({"cache": {"folder": "x", "max_bytes": "9" * 400}}, "9': expected bytes, such as"),
    ({"cache": {"folder": "x", "max_bytes": 1000}}, "the size of two units"),
    ({"cache": {"folder": "gs://x", "max_bytes": "1GB"}}, "local disk"),
]


@pytest.mark.parametrize(("options", "expected"), WRONG_OPTIONS)
def test_wrong_options_are_named(options, expected, tmp_path):
    with pytest.raises((CorpusError, StorageError, WrongTypeError), match=expected):
        grain_sft.open_corpus(tmp_path, remote=options)


def test_an_environment_variable_with_a_wrong_value_is_named(monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_REMOTE_SECONDS", "soon")
    with pytest.raises(grain_sft.GrainSftError, match=r"\$GRAIN_SFT_REMOTE_SECONDS is 'soon'"):
        Limits.from_environment()
