"""No file in a machine's cache changes a row, even if it is damaged, swapped, of another corpus or in an older format."""

import hashlib
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import sft_files
from megatron_corpora import write_prefix
from mutators import changed_bytes

from grain_sft import IndexSampler, NpyDataSource, PackedLayout, PaddedLayout, open_corpus
from grain_sft.corpus import boundary_documents, content, document_finder
from grain_sft.errors import LayoutError
from grain_sft.layout.report import plan_files
from grain_sft.prepare.materialize import materialize
from grain_sft.replay.learning_rate import supervised_ratio
from grain_sft.sampling.orders import exact
from grain_sft.storage import describe, hashing

TOKENS = 10_000
ENDS = 2_500  # tokens that all corpora share at each end of a file; its fingerprint hashes 4 KiB, 2,048 tokens, there
EOS, BOS = sft_files.EOS, 1
LENGTH = 128
EPISODES = 900  # 16 bytes each in the index: its hashed ends of 4 KiB hold the first and the last 256 episodes


@pytest.fixture
def cache(tmp_path, monkeypatch, own_cache):
    """The cache folder. The usual limits, by which small and new files and short orders are not cached, are switched off."""
    monkeypatch.setattr(document_finder, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_CACHED_FROM", 0)
    monkeypatch.setattr(content, "_SETTLED", -1.0)
    monkeypatch.setattr(exact, "IN_MEMORY_ROWS", 1)
    return tmp_path / "cache"


def write_plain(folder: Path, number: int) -> None:
    """Write two files of tokens. All corpora have equal ends of files. In the middle, corpus `number` has its own tokens."""
    folder.mkdir(parents=True)
    common, own = np.random.default_rng(0), np.random.default_rng([1, number])
    for part in range(2):
        tokens = common.integers(3, 50_000, TOKENS)
        tokens[::40] = EOS
        middle = tokens[ENDS : TOKENS - ENDS]
        middle[:] = own.integers(3, 50_000, len(middle))
        middle[own.random(len(middle)) < 1 / own.integers(15, 60)] = EOS
        begins = np.flatnonzero(middle[:-1] == EOS) + 1
        middle[begins[own.random(len(begins)) < 0.7]] = BOS
        tokens[-1] = EOS
        tokens.astype("<u2").tofile(folder / f"{part}.npy")


def write(folder: Path, number: int) -> None:
    """Write corpus `number` in three formats. Corpora differ in the middle of files: in tokens, or in lengths and weights."""
    write_plain(folder / "plain", number)
    common, own = np.random.default_rng(2), np.random.default_rng([3, number])
    length = common.integers(2, 30, EPISODES)
    length[300:-300] = own.permutation(length[300:-300])
    ends, total = np.cumsum(length)[:-1], int(length.sum())
    tokens, weights = common.integers(3, 900, total), common.random(total).astype(np.float32)
    weights[2000:-2000] = own.random(total - 4000)
    weights[own.random(total) < 0.3 * (np.abs(np.arange(total) - total // 2) < 2000)] = 0
    docs = list(zip(np.split(tokens, ends), np.split(weights, ends), strict=True))
    sft_files.write_episodes(folder / "episodes", docs)
    rows = common.integers(3, 900, (300, 20))
    rows[100:200] = own.integers(3, 900, (100, 20))
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    sft_files.write_openchat(folder / "openchat", [(row, np.ones(20, np.float32)) for row in rows], **plain)


def opened(path: Path):
    return open_corpus(path, dtype="uint16", eos_token_id=EOS)


def layouts_of(folder: Path) -> Iterator[tuple[str, PackedLayout | PaddedLayout]]:
    plain, episodes = opened(folder / "plain"), open_corpus(folder / "episodes")
    yield "eos", PackedLayout(plain, LENGTH)
    yield "eos, padded", PaddedLayout(plain, LENGTH)
    yield "eos, bos", PackedLayout(plain, LENGTH, bos_token_id=BOS)
    yield "eos, multipack", PackedLayout(plain, LENGTH, algorithm="multipack", epochs=2, seed=4)
    yield "files", PackedLayout(episodes, LENGTH, algorithm="first_fit_decreasing")
    yield "files, padded", PaddedLayout(episodes, LENGTH)
    yield "openchat", PaddedLayout(open_corpus(folder / "openchat"), LENGTH)


def hash_of(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


def used(folder: Path, orders: bool = True) -> dict[str, str]:
    """Return everything that may come from the cache: hashes of all rows and orders, and the share of tokens that take loss."""
    found = {}
    for name, layout in layouts_of(folder):
        highest = layout.highest_token if isinstance(layout, PackedLayout) else ""
        rows = NpyDataSource(layout).read(range(len(layout)))
        found[name] = f"{len(layout)} {highest} {hash_of(*rows.values())}"
    found["supervised"] = repr(supervised_ratio(open_corpus(folder / "episodes")))
    for epoch in range(2 * orders):
        sampler = IndexSampler(5_000, global_batch_size=5_000, seed=3, order="olmo")
        found[f"order {epoch}"] = hash_of(sampler.rows(epoch))
    return found


def kept(cache: Path) -> set[Path]:
    """Return the files of the cache, without locks and without the hashes of files (folder `content`)."""
    files = (path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path for path in files if path.parent.name != "content"}


@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.heavy)])
def test_rows_are_the_same_with_an_empty_cache_and_with_all_other_corpora_in_it(tmp_path, cache, monkeypatch, count):
    """All corpora have equal sizes and ends of files. 24 of them make 552 pairs of a corpus and another one in the cache."""
    folders = [tmp_path / str(number) for number in range(count)]
    expected = []
    for number, folder in enumerate(folders):
        write(folder, number)
        monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "empty" / str(number)))
        expected.append(used(folder, orders=False))
    assert len({opened(folder / "plain").fingerprint for folder in folders}) == 1
    assert len({open_corpus(folder / "episodes").fingerprint for folder in folders}) == 1
    assert len({describe(str(folder / "openchat" / "openchat.train.parquet")).digest for folder in folders}) == 1
    for name in expected[0]:
        distinct = len({each[name] for each in expected})
        assert distinct == count or (name == "supervised" and distinct > count // 2), name
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(cache))
    for _ in range(2):  # in the first pass, the cache has only the corpora before it
        assert [used(folder, orders=False) for folder in folders] == expected
    shutil.copytree(folders[0], tmp_path / "copy")
    before = kept(cache)
    assert used(tmp_path / "copy", orders=False) == expected[0]
    assert kept(cache) == before


def test_a_file_that_is_rewritten_in_place_has_the_rows_of_its_new_tokens(tmp_path, cache, monkeypatch):
    """The file's size, its ends and its modification time stay the same."""
    monkeypatch.setattr(content, "_SETTLED", 0.02)
    target, rows = tmp_path / "corpus.npy", set()
    for number in range(4):
        write_plain(tmp_path / str(number), number)
        target.write_bytes((tmp_path / str(number) / "0.npy").read_bytes())
        os.utime(target, ns=(10**18, 10**18))
        time.sleep(0.1)
        layouts = [PackedLayout(opened(target), LENGTH) for _ in range(2)]
        monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "empty" / str(number)))
        layouts.append(PackedLayout(opened(target), LENGTH))
        monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(cache))
        found = {str([layout.spans(row) for row in range(len(layout))]) for layout in layouts}
        assert len(found) == 1
        rows |= found
    assert len(rows) == 4


def test_a_boundary_file_is_read_once(tmp_path, cache, calls_of):
    """The cache keeps the hash of the file's documents, so the next process reads the file only if it changed."""
    prefix = write_prefix(tmp_path, "a", documents=9, seed=0)
    reads = calls_of(boundary_documents, "read_whole")
    first = open_corpus(prefix).documents.content
    assert open_corpus(prefix).find_documents().content == first and len(reads) == 1
    write_prefix(tmp_path, "a", documents=9, seed=1)
    assert open_corpus(prefix).find_documents().content != first and len(reads) == 2


def test_a_file_that_was_written_just_now_is_hashed_again(tmp_path, monkeypatch, own_cache):
    """Two writes within a tick of the clock may give a file the same times, so hashes of new files are not cached."""
    monkeypatch.setattr(content, "_CACHED_FROM", 0)
    write_plain(tmp_path / "corpus", 0)
    corpus = opened(tmp_path / "corpus")
    first = corpus.content_hash()
    assert not list(tmp_path.rglob("*.arrays"))
    status = os.stat(corpus.shards[0].path)
    monkeypatch.setattr(time, "time", lambda: max(status.st_mtime, status.st_ctime) + 60)
    assert corpus.content_hash() == first
    assert len(list(tmp_path.rglob("*.arrays"))) == 1
    monkeypatch.setattr(hashing, "of_file", None)
    assert corpus.content_hash() == first


def test_a_corpus_that_changes_after_its_scan_leaves_no_plan_that_its_new_content_would_use(tmp_path, cache):
    for number in range(2):
        write_plain(tmp_path / str(number), number)
    target, new = tmp_path / "corpus.npy", tmp_path / "1" / "0.npy"
    shutil.copy(tmp_path / "0" / "0.npy", target)
    old = opened(target)
    assert len(old.documents)
    time.sleep(0.05)
    target.write_bytes(new.read_bytes())
    PackedLayout(old, LENGTH)  # packs the documents that it found before the write
    layout = PackedLayout(opened(new), LENGTH)
    assert layout.statistics["documents"] == np.count_nonzero(np.fromfile(new, "<u2") == EOS)


def test_materialized_rows_are_not_taken_for_those_of_a_corpus_with_equal_ends(tmp_path, cache):
    for number in range(2):
        write(tmp_path / str(number), number)
    first, second = (dict(layouts_of(tmp_path / str(number)))["files"] for number in range(2))
    materialize(first, tmp_path / "rows")
    with pytest.raises(LayoutError, match="holds other rows"):
        materialize(second, tmp_path / "rows")


DAMAGES = ("changed", "empty", "swapped", "of an older format", "a pipe")
"""Kinds of damage. By default, only every second kind is tried."""


def damage(path: Path, kind: str, draw: random.Random) -> None:
    data = path.read_bytes()
    match kind:
        case "changed":
            data = changed_bytes(data, draw)
        case "empty":
            data = b""
        case "of an older format":
            data = b"GSFTART1" + data[8:]
        case "swapped":
            folder = path.parent.parent if path.parent.parent.name == "openchat" else path.parent
            others = sorted(each for each in folder.rglob(f"*{path.suffix}") if each != path and each.is_file())
            if others:
                other = draw.choice(others)
                swapped = other.read_bytes()
                other.write_bytes(data)
                data = swapped
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("turns", [1, pytest.param(12, marks=pytest.mark.heavy)])
def test_rows_stay_the_same_if_all_files_of_the_cache_are_damaged(tmp_path, cache, turns):
    write(tmp_path / "one", 0)
    write(tmp_path / "two", 1)
    expected = {name: used(tmp_path / name) for name in ("one", "two")}
    kinds = {path.relative_to(cache).parts[0] for path in cache.rglob("*") if path.is_file()}
    assert kinds == {"content", "documents", "plans", "orders", "openchat"}
    draw = random.Random(5)
    for turn in range(turns):
        for kind in DAMAGES if turns > 1 else DAMAGES[::2]:
            for path in sorted(cache.rglob("*")):  # damage all files, as one run may meet several
                if path.is_file() and path.suffix != ".lock":
                    damage(path, kind, draw)
            for name, rows in expected.items() if turns > 1 else [("one", expected["one"])]:
                assert used(tmp_path / name) == rows, (kind, turn)
    assert plan_files(dict(layouts_of(tmp_path / "one"))["eos"])
