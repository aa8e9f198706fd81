"""Reads of a corpus in S3 return the right values, or fail. The real s3fs client reads from moto's server on this machine."""

import errno
import threading
from unittest import mock

import fsspec
import numpy as np
import pytest
from failing_proxy import Proxy

import grain_sft

s3fs = pytest.importorskip("s3fs")
moto = pytest.importorskip("moto.server")


@pytest.fixture(scope="module")
def proxy():
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    while not server.get_host_and_port()[1]:
        threading.Event().wait(0.01)
    proxy = Proxy("http://{}:{}".format(*server.get_host_and_port()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", proxy.address)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        client = fsspec.filesystem("s3")
        client.mkdir("bucket")
        client.pipe({f"bucket/data/{shard}.npy": tokens(shard).tobytes() for shard in range(3)})
        proxy.client = client
        yield proxy
    proxy.close()
    server.stop()


@pytest.fixture(params=[False, True], ids=["direct", "cached"])
def remote(request, tmp_path):
    return {"cache": {"folder": tmp_path, "max_bytes": "1MiB", "unit": "64KiB"} if request.param else None}


def tokens(shard):
    # more than 40 blocks for the cache: of the 12 requests for 200 kB a shard, no request failed in some runs
    return np.random.default_rng(shard).integers(0, 50_000, 500_000, dtype=np.uint32)


def read(corpus, rows):
    """Return rows of 100 tokens, read by a new source."""
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 100)).read(rows)["tokens"]


def test_rows_are_the_same_although_some_requests_fail(proxy, remote):
    corpus = grain_sft.open_corpus("s3://bucket/data/", remote=remote)
    expected = np.concatenate([tokens(shard) for shard in range(3)]).reshape(-1, 100)
    proxy.refused, proxy.cut = 0.2, 0.1
    for seed in range(5):
        rows = np.random.default_rng(seed).integers(0, len(expected), 12)
        np.testing.assert_array_equal(read(corpus, rows), expected[rows])
    assert proxy.failures
    proxy.heal()


def test_versions_of_an_object_that_is_replaced_while_in_use_are_never_mixed(proxy, remote):
    proxy.client.pipe_file("bucket/used/0.npy", tokens(0).tobytes())
    corpus = grain_sft.open_corpus("s3://bucket/used/0.npy", remote=remote)
    old = corpus.read(0, 1024)[0]
    other = tokens(0)
    other[1024:-1024] += 1
    proxy.client.pipe_file("bucket/used/0.npy", other.tobytes())
    for _ in range(2):
        with pytest.raises(grain_sft.GrainSftError, match=r"s3://bucket/used/0.npy: .* is gone: it was replaced"):
            corpus.read(20_000, 30_000)
    if remote["cache"]:
        np.testing.assert_array_equal(corpus.read(0, 1024)[0], old)
    new = grain_sft.open_corpus("s3://bucket/used/0.npy", remote=remote)
    np.testing.assert_array_equal(new.read(0, 20_001)[0], other[:20_001])
    with pytest.raises(grain_sft.GrainSftError, match=r"s3://bucket/none.npy: no such file"):
        grain_sft.open_corpus("s3://bucket/none.npy")


def test_the_object_is_named_if_all_requests_fail(proxy, monkeypatch):
    corpus = grain_sft.open_corpus("s3://bucket/data/", remote={"seconds": 2})
    proxy.refused = 1.0
    ends = "(0 to 4096|1995904 to 2000000)"  # requested at once: under load, the time of either may be up first
    with pytest.raises(grain_sft.GrainSftError, match=rf"s3://bucket/data/0.npy: bytes {ends} can't be read: .*within [12]"):
        read(corpus, [0])
    proxy.heal()
    monkeypatch.setenv("GRAIN_SFT_REMOTE_SECONDS", "1")
    list_folder = s3fs.S3FileSystem._lsdir
    unlisted = mock.AsyncMock(side_effect=OSError(errno.EBUSY, "Slow down"))
    choose = lambda client, path, *a, **k: (unlisted if "data" in path else list_folder)(client, path, *a, **k)  # noqa: E731
    monkeypatch.setattr(s3fs.S3FileSystem, "_lsdir", choose)
    for where, named in (("s3://bucket/*/0.npy", r"\*/0.npy"), (["s3://bucket/data/0.npy"], "data")):  # metadata may be missed
        with pytest.raises(grain_sft.GrainSftError, match=rf"s3://bucket/{named}: can't be read: .*Slow down"):
            grain_sft.open_corpus(where)
