"""Reads of objects that are replaced, cut, sent twice or without end return the right bytes, or fail in time."""

import functools
import itertools
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import sft_files
import yaml
from batches import sections
from failing_proxy import WRONG_BODIES, before_emulator

import grain_sft
from grain_sft.storage import files, open_remote

URL = "gs://bucket/versions/"
LENGTH = 512
TOKENS = 40 * LENGTH
SECONDS = 1


def tokens(version, shard):
    """Return the tokens of a shard. Its versions differ only in the middle."""
    made = np.arange(TOKENS, dtype=np.uint32) + shard
    made[1024:-1024] += 1000 * version
    return made


def put_all(version, client, folder):
    """Write all objects in a version to the bucket, without the proxy."""
    objects = {f"t/{shard}.npy": tokens(version, shard).tobytes() for shard in range(2)}
    objects["mix.txt"] = "\n".join(f"a,{URL}t/{(number + version) % 2}.npy" for number in range(400)).encode()
    config = sections(f"{URL}t/*.npy", LENGTH, corpus={"dtype": "uint32"}, layout="windows", seed=version)
    objects["config.yaml"] = yaml.safe_dump(config).encode()
    sft = folder / f"sft{version}"
    if not sft.exists():
        changed = [(each, ~loss if version else loss) for each, loss in sft_files.documents(1500, seed=3, high=1000)]
        sft_files.write_olmo(sft, changed, part_tokens=12_000, sources=True)
    objects |= {f"sft/{path.name}": path.read_bytes() for path in sft.iterdir()}
    client.pipe({f"bucket/versions/{name}": data for name, data in objects.items()})


@pytest.fixture(scope="module")
def made(client, tmp_path_factory):
    """A proxy before a bucket that has all objects in version 0, and a folder for files."""
    folder = tmp_path_factory.mktemp("made")
    put_all(0, client, folder)
    with before_emulator() as proxy:
        grain_sft.open_corpus(f"{URL}t/*.npy", dtype="uint32").save(folder / "index.json")
        client.put(str(folder / "index.json"), "bucket/versions/index.json")
        yield proxy, folder


@pytest.fixture
def proxy(made):
    made[0].heal()
    return made[0]


@pytest.fixture
def put_version(client, made):
    """`put_version(version)` writes all objects in this version. After the test, version 0 is written again."""
    write = functools.partial(put_all, client=client, folder=made[1])
    yield write
    write(0)


def read(corpus):
    return [None if each is None else each.tobytes() for each in corpus.read(0, corpus.num_tokens)]


READS_AFTER_OPENING = {
    "tokens": ("t/*.npy", read),
    "tokens through the cache": ("t/*.npy", read),
    "masks": ("sft/", lambda corpus: read(corpus)[1]),
    "boundaries": ("sft/", lambda corpus: [each.tobytes() for each in corpus.documents]),
    "sources": ("sft/", lambda corpus: (len(corpus.documents), corpus.sources.tobytes())),
}
"""Reads of a corpus that is opened before its objects change, with its path. They never return another version."""

READS_WITH_OPENING = {
    "mix": lambda: [shard.path for shard in grain_sft.open_corpus(f"{URL}mix.txt", dtype="uint32").shards],
    "index": lambda: grain_sft.open_corpus(f"{URL}index.json").fingerprint,
    "metadata": lambda: grain_sft.open_corpus(f"{URL}sft/").fingerprint,
    "config": lambda: grain_sft.load(f"{URL}config.yaml")[0]["inputs"].tobytes(),
    "text": lambda: files.read_text(f"{URL}mix.txt"),
}
"""Reads that open objects themselves. They may return the version before or the version after a change."""

READS = [*READS_AFTER_OPENING, *READS_WITH_OPENING]


@pytest.fixture
def make_read(made, tmp_path):
    """`make_read(name)` returns the function of this name. For one of `READS_AFTER_OPENING`, it first opens the corpus."""
    numbers = itertools.count()

    def make(name):
        if name in READS_WITH_OPENING:
            return READS_WITH_OPENING[name]
        path, read_from = READS_AFTER_OPENING[name]
        options = {"dtype": "uint32"} if path.endswith(".npy") else {}
        if name == "tokens through the cache":
            cache = {"folder": tmp_path / str(next(numbers)), "max_bytes": "64MiB", "unit": "32KiB"}
            options["remote"] = {"seconds": 3 * SECONDS, "cache": cache}
        corpus = grain_sft.open_corpus(f"{URL}{path}", **options)
        return lambda: read_from(pickle.loads(pickle.dumps(corpus)))  # like another process, which has read nothing

    return make


def peak_from_now():
    """Return a function that returns the growth of this process's peak memory since now, in MiB."""

    def peak():
        return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    return lambda: peak() - before


def outcome(read):
    try:
        return read()
    except grain_sft.GrainSftError as error:
        assert URL.removeprefix("gs://").rstrip("/") in str(error), error
        return error


def pairs(firsts, seconds, few):
    """Return all pairs as test cases. Pairs that are not in `few` are heavy."""
    every = itertools.product(firsts, seconds)
    return [pytest.param(*pair, marks=() if pair in few else pytest.mark.heavy) for pair in every]


BODIES = sorted(WRONG_BODIES)
EACH_ONCE = set(zip(BODIES, itertools.cycle(READS), strict=False))  # one read for each wrong body


@pytest.mark.parametrize(("wrong", "name"), pairs(BODIES, READS, EACH_ONCE))
def test_a_wrong_body_is_an_error_or_is_requested_again(proxy, make_read, monkeypatch, name, wrong):
    expected = make_read(name)()
    read = make_read(name)
    monkeypatch.setenv("GRAIN_SFT_REMOTE_SECONDS", str(SECONDS))
    peak = peak_from_now()
    proxy.body = wrong
    found = outcome(read)
    assert isinstance(found, Exception) and proxy.failures[wrong], found
    proxy.share = 0.2
    for _ in range(2):
        found = outcome(read)
        assert isinstance(found, Exception) or found == expected
    proxy.heal()
    monkeypatch.delenv("GRAIN_SFT_REMOTE_SECONDS")
    assert make_read(name)() == expected
    assert peak() < 300


SECOND = [(name, 2) for name in ("tokens", "tokens through the cache", "masks", "text")]


@pytest.mark.parametrize(("name", "request_number"), pairs(READS, range(1, 13), SECOND))
def test_objects_that_are_replaced_during_a_read_are_never_mixed(proxy, make_read, put_version, name, request_number):
    """All objects are replaced just before request number `request_number` is answered."""
    old = make_read(name)()
    put_version(1)
    new = outcome(lambda: make_read(name)())
    put_version(0)
    read = make_read(name)
    proxy.clear()
    proxy.before = lambda number: number == request_number and put_version(1)
    found = outcome(read)
    proxy.before = None
    assert isinstance(found, Exception) or found == old or (name in READS_WITH_OPENING and found == new)


def test_a_range_of_several_requests_is_of_one_version(proxy, put_version, monkeypatch):
    monkeypatch.setattr("grain_sft.storage.remote.files.PART_BYTES", 32 << 10)
    old, new = tokens(0, 0).tobytes(), tokens(1, 0).tobytes()
    for request_number in range(1, 5):  # one request for the version and three for the bytes
        put_version(0)
        proxy.clear()
        proxy.before = lambda number, chosen=request_number: number == chosen and put_version(1)
        found = files.read_range(f"{URL}t/0.npy", 0, len(old))
        proxy.before = None
        assert found in (old, new)


def test_an_index_has_the_versions_of_objects_or_gets_them_when_it_is_opened(proxy, put_version, tmp_path):
    grain_sft.open_corpus(f"{URL}t/*.npy", dtype="uint32").save(tmp_path / "index.json")
    stated = json.loads((tmp_path / "index.json").read_text())
    for shard in stated["shards"]:
        assert shard.pop("version").startswith("generation ")
    (tmp_path / "old.json").write_text(json.dumps(stated))
    opened = [grain_sft.open_corpus(tmp_path / name) for name in ("old.json", "index.json")]
    old, new = pickle.loads(pickle.dumps(opened))
    assert old == new and old.shards[0].version == new.shards[0].version
    put_version(1)
    for corpus in (old, new):
        with pytest.raises(grain_sft.GrainSftError, match=r"t/0.npy: .*replaced"):
            corpus.read(0, TOKENS)


def test_an_open_remote_file_is_of_one_version(proxy, put_version):
    data = tokens(0, 1).tobytes()
    with open_remote(f"{URL}t/1.npy") as file:
        for start, count in np.random.default_rng(0).integers(0, len(data), (20, 2)).tolist():
            file.seek(start)
            assert file.read(count) == data[start : start + count]
        assert file.seek(0, 2) == len(data) and not file.read(1)
    with open_remote(f"{URL}t/1.npy") as file:
        put_version(1)
        file.seek(4096)
        with pytest.raises(grain_sft.GrainSftError, match=r"t/1.npy: .* is gone: it was replaced"):
            file.read()


def test_an_endless_answer_to_a_metadata_request_is_an_error(proxy, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_REMOTE_SECONDS", str(SECONDS))
    proxy.endless, peak = True, peak_from_now()
    assert isinstance(outcome(lambda: files.size(f"{URL}mix.txt")), Exception)
    assert proxy.requests["streamed"] and peak() < 300
