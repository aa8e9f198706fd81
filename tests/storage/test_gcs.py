"""A corpus in a bucket equals its local copy. The real gcsfs client reads it from an emulator of Cloud Storage."""

import batches
import fsspec
import numpy as np
import pytest
from failing_proxy import before_emulator
from test_files import error_of

import grain_sft
from grain_sft.storage import files

COUNTS = {"web/0.npy": 40, "web/1.npy": 25, "code/deep/0.npy": 5000, "code/true.npy": 33, "empty.npy": 0}
MIX = "# a mix\nweb,web/1.npy\nweb,web/0.npy\ncode,code/deep/0.npy\ncode,code/true.npy\nweb,web/1.npy\nnone,empty.npy\n"
LENGTH = 8
BUCKET = "gs://bucket/data/"
LONG = "bucket/data/code/deep/0.npy"


@pytest.fixture
def folder(tmp_path, write_tokens):
    """Local folder of a corpus in which no two tokens are equal."""
    start = 0
    for name, count in COUNTS.items():
        path = write_tokens(f"data/{name}", np.arange(start, start + count))
        if name == "code/true.npy":
            np.save(path, np.arange(start, start + count, dtype=np.uint32))
        start += count
    (tmp_path / "data" / "mix.txt").write_text(MIX)
    return tmp_path / "data"


@pytest.fixture(autouse=True)
def bucket(client, folder):
    """Copy `folder` to `BUCKET`."""
    client.put(f"{folder}/", "bucket/data/", recursive=True)
    yield
    client.rm("bucket/data", recursive=True)


@pytest.fixture
def proxy(bucket):
    with before_emulator() as proxy:
        yield proxy


def source(corpus, **options):
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH), **options)


def assert_same(remote, local, folder):
    assert [(s.path, s.label, s.num_tokens, s.size, s.data_offset) for s in remote.shards] == [
        (s.path.replace(f"{folder}/", BUCKET), s.label, s.num_tokens, s.size, s.data_offset) for s in local.shards
    ]
    assert remote.fingerprint == local.fingerprint
    mine, other = source(remote), source(local)
    assert len(mine) == len(other) and repr(mine) == repr(other)
    rows = np.random.default_rng(0).permutation(len(mine))[:100]
    rows = [*rows, rows[0], -1]
    batches.assert_same(mine.read(rows), other.read(rows))
    np.testing.assert_array_equal(mine[0]["tokens"], other[0]["tokens"])


LISTED = ["code/true.npy", "web/*.npy", "code/deep"]
PLACES = ["mix.txt", "*/*.npy", "**/0.npy", "web/?.npy", "code/true.npy", "", "code", "web/", LISTED]


@pytest.mark.parametrize("where", PLACES, ids=str)
def test_mixes_globs_directories_files_and_lists_in_a_bucket_open_as_their_local_copies(folder, where):
    def under(root):
        return [f"{root}{each}" for each in where] if isinstance(where, list) else f"{root}{where}"

    for options in ({}, {"dtype": "uint32", "eos_token_id": 7}) if where == "mix.txt" else ({},):
        local, remote = (grain_sft.open_corpus(under(root), **options) for root in (f"{folder}/", BUCKET))
        assert_same(remote, local, folder)
        assert remote.num_documents == local.num_documents


def test_a_local_mix_of_urls_and_of_local_files_is_read(folder, tmp_path):
    (tmp_path / "mixed.txt").write_text(f"a,{BUCKET}web/0.npy\nb,{folder}/web/1.npy\nc,{BUCKET}code/deep/0.npy\n")
    mixed = grain_sft.open_corpus(tmp_path / "mixed.txt")
    local = grain_sft.open_corpus(tmp_path / "mixed.txt", path_remap={BUCKET: f"{folder}/"})
    assert mixed.fingerprint == local.fingerprint
    rows = [*range(20), 3, 300, 5]
    np.testing.assert_array_equal(source(mixed).read(rows)["tokens"], source(local).read(rows)["tokens"])


def test_an_index_of_a_bucket_opens_without_requests_to_the_bucket(folder, tmp_path, proxy):
    remote, local = grain_sft.open_corpus(f"{BUCKET}mix.txt"), grain_sft.open_corpus(folder / "mix.txt")
    remote.save(tmp_path / "index.json")
    remote.save(tmp_path / "maxtext.json", format="maxtext", sequence_length=LENGTH, tokenizer="some")
    proxy.clear()
    again = grain_sft.open_corpus(tmp_path / "index.json")
    assert not proxy.requests
    assert again == remote
    assert_same(again, local, folder)
    assert_same(grain_sft.open_corpus(tmp_path / "maxtext.json"), local, folder)


def test_an_index_of_local_files_opens_for_a_bucket_by_path_remap_or_as_a_copy_in_the_bucket(client, folder, tmp_path):
    local = grain_sft.open_corpus(folder / "mix.txt")
    for path in (folder / "index.json", tmp_path / "elsewhere" / "index.json"):
        local.save(path)
        assert_same(grain_sft.open_corpus(path, path_remap={f"{folder}/": BUCKET}), local, folder)
    client.pipe_file("bucket/data/index.json", (folder / "index.json").read_bytes())
    assert_same(grain_sft.open_corpus(f"{BUCKET}index.json"), local, folder)


def test_each_file_is_checked_once_even_if_only_one_may_be_open(proxy):
    mine = source(grain_sft.open_corpus(f"{BUCKET}mix.txt"), max_open_files=1)
    rows = [0, 3, 10, 634, 0]  # rows of four files; row 0 twice
    mine.read(rows)
    proxy.clear()
    mine.read(rows)
    assert proxy.requests == {"media": len(rows)}


@pytest.mark.parametrize("bucket_name", ["bucket", "no-such-bucket"])
def test_objects_that_are_not_in_the_bucket_are_named(client, bucket_name):
    for name in ("none.npy", "none.bin", "none.txt", "none.json", "none", "none/*.npy", "none/"):
        for url in (f"gs://{bucket_name}/{name}", [f"gs://{bucket_name}/{name}"]):
            assert f"gs://{bucket_name}/{name}" in error_of(grain_sft.open_corpus, url)
    assert f"{BUCKET}code: is a folder; expected a file" in error_of(grain_sft.open_corpus, f"{BUCKET}c*")
    client.rm("bucket/data/web/0.npy")
    message = error_of(grain_sft.open_corpus, f"{BUCKET}mix.txt")
    assert f"{BUCKET}web/0.npy: no such file" in message and "path_remap" in message


CHANGES = [
    (bytes(20), "the file shrank since it was indexed: 20 bytes, expected 20000"),
    (bytes(20_004), "the file grew since it was indexed: 20004 bytes, expected 20000"),
    (bytes(20_000), "the file has the size that was indexed, but other content: it was replaced"),
    (None, "no such file"),
]


@pytest.mark.parametrize(("data", "expected"), CHANGES, ids=[expected for _, expected in CHANGES])
def test_an_object_that_changed_since_it_was_indexed_is_named(client, data, expected):
    mine, in_use = (source(grain_sft.open_corpus(f"{BUCKET}mix.txt")) for _ in range(2))
    in_use.read([100, 101])
    client.rm(LONG) if data is None else client.pipe_file(LONG, data)
    mine.read([0, 1])  # rows of an unchanged file
    for _ in range(2):
        assert f"gs://{LONG}: {expected}" in error_of(mine.read, [0, 100])
    assert f"gs://{LONG}: " in error_of(in_use.read, [0, 600])


def test_an_object_that_was_written_after_a_listing_is_seen(client):
    assert len(grain_sft.open_corpus(f"{BUCKET}web/*.npy").shards) == 2
    client.pipe_file("bucket/data/web/2.npy", bytes(8))
    client.pipe_file("bucket/data/web/1.npy", bytes(4))
    assert [shard.num_tokens for shard in grain_sft.open_corpus(f"{BUCKET}web/*.npy").shards] == [40, 1, 2]


def test_a_url_of_an_unknown_protocol_and_a_wrong_token_are_errors(monkeypatch):
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": {"type": "external_account"}})
    for url in ("nosuch://bucket/a.npy", "gs://bucket/a.npy"):
        assert f"{url}: fsspec can't make a file system" in error_of(grain_sft.open_corpus, url)


def test_an_exception_of_the_client_becomes_an_error_that_names_the_url():
    for failure in (PermissionError("Forbidden: b"), RuntimeError("token expired"), ValueError("Bad Request: b")):
        expected = rf"gs://b/a.npy: can't be read \({type(failure).__name__}: {failure}\)"
        with pytest.raises(grain_sft.GrainSftError, match=expected), files.remote("gs://b/a.npy"):
            raise failure
