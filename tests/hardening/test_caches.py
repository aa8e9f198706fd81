"""What a machine's cache holds never decides a row: other corpora, older ones, damaged files, files of other names."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from caches import EOS, LENGTH, keep_everything, layouts_of, used, write, write_plain

from grain_sft import PackedLayout, open_corpus
from grain_sft.corpus import content
from grain_sft.errors import LayoutError
from grain_sft.layout.report import plan_files
from grain_sft.prepare.materialize import materialize
from grain_sft.storage.file_stamp import describe

pytest.importorskip("pyarrow")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    keep_everything(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache"


def opened(path: Path):
    return open_corpus(path, dtype="uint16", eos_token_id=EOS)


def kept(cache: Path) -> set[Path]:
    """What is kept of corpora, but for the hashes that this machine remembers of files."""
    files = (path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock")
    return {path for path in files if path.parent.name != "content"}


@pytest.mark.parametrize("count", [4, pytest.param(24, marks=pytest.mark.heavy)])
def test_rows_are_the_same_with_an_empty_cache_and_one_full_of_every_other_corpus(tmp_path, cache, monkeypatch, count):
    """24 corpora of equal sizes and ends are 552 pairs of a corpus and another one in the cache."""
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
    for _ in range(2):  # the cache is full of the corpora before, then of all
        for folder, rows in zip(folders, expected, strict=True):
            assert used(folder, orders=False) == rows
    shutil.copytree(folders[0], tmp_path / "copy")
    before = kept(cache)
    assert used(tmp_path / "copy", orders=False) == expected[0]
    assert kept(cache) == before


def test_a_file_that_is_rewritten_in_place_has_rows_of_its_own(tmp_path, cache, monkeypatch):
    """Also where its size, its ends and the time of its last change stay as they were."""
    monkeypatch.setattr(content, "_SETTLED", 0.02)
    rows = []
    for number in range(4):
        write_plain(tmp_path / str(number), number)
        target = tmp_path / "corpus.npy"
        target.write_bytes((tmp_path / str(number) / "0.npy").read_bytes())
        os.utime(target, ns=(10**18, 10**18))
        time.sleep(0.1)
        corpus = opened(target)
        layouts = [PackedLayout(corpus, LENGTH), PackedLayout(opened(target), LENGTH)]
        monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "empty" / str(number)))
        layouts.append(PackedLayout(opened(target), LENGTH))
        monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(cache))
        found = [[layout.spans(row) for row in range(len(layout))] for layout in layouts]
        assert found[0] == found[1] == found[2]
        rows.append(str(found[0]))
    assert len(set(rows)) == 4


def test_a_file_that_was_written_just_now_is_hashed_again(tmp_path, monkeypatch):
    """Times may not change when a file is written to twice within a tick of the clock."""
    monkeypatch.setattr(content, "_REMEMBERED_FROM", 0)
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))
    write_plain(tmp_path / "corpus", 0)
    corpus = opened(tmp_path / "corpus")
    first = corpus.content_hash()
    assert not list(tmp_path.rglob("*.arrays"))
    status = os.stat(corpus.shards[0].path)
    monkeypatch.setattr(time, "time", lambda: max(status.st_mtime, status.st_ctime) + 60)
    assert corpus.content_hash() == first
    assert len(list(tmp_path.rglob("*.arrays"))) == 1
    monkeypatch.setattr(content, "read_hashes", None)
    assert corpus.content_hash() == first


def test_a_corpus_that_changes_after_it_was_scanned_leaves_no_plan_under_the_name_of_its_new_content(tmp_path, cache):
    for number in range(2):
        write_plain(tmp_path / str(number), number)
    target = tmp_path / "corpus.npy"
    shutil.copy(tmp_path / "0" / "0.npy", target)
    old = opened(target)
    assert len(old.documents)
    time.sleep(0.05)
    target.write_bytes((tmp_path / "1" / "0.npy").read_bytes())
    PackedLayout(old, LENGTH)  # of the documents as they were
    shutil.copy(tmp_path / "1" / "0.npy", tmp_path / "new.npy")
    new = PackedLayout(opened(tmp_path / "new.npy"), LENGTH)
    tokens = np.fromfile(tmp_path / "new.npy", "<u2")
    assert new.statistics["documents"] == np.count_nonzero(tokens == EOS)


def test_written_rows_are_not_taken_for_those_of_a_corpus_of_equal_ends(tmp_path, cache):
    for number in range(2):
        write(tmp_path / str(number), number)
    layouts = [dict(layouts_of(tmp_path / str(number)))["files"] for number in range(2)]
    materialize(layouts[0], tmp_path / "rows")
    with pytest.raises(LayoutError, match="holds other rows"):
        materialize(layouts[1], tmp_path / "rows")


DAMAGES = ("flipped", "cut", "zeroed", "empty", "swapped", "replaced by an older one", "a pipe")
"""Every second one is tried by default."""


def damage(path: Path, kind: str, random: np.random.Generator) -> None:
    """Damage one file of the cache."""
    data = bytearray(path.read_bytes())
    at = int(random.integers(len(data) or 1))
    match kind:
        case "flipped" if data:
            data[at] ^= 1 << int(random.integers(8))
        case "cut":
            del data[at:]
        case "zeroed":
            data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        case "empty":
            data.clear()
        case "replaced by an older one":
            data[:8] = b"GSFTART1"
        case "swapped":
            folder = path.parent.parent if path.parent.parent.name == "openchat" else path.parent
            alike = sorted(each for each in folder.rglob(f"*{path.suffix}") if each != path and each.is_file())
            if alike:
                other = alike[int(random.integers(len(alike)))]
                swapped = other.read_bytes()
                other.write_bytes(data)
                data = bytearray(swapped)
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(data)


@pytest.mark.parametrize("turns", [1, pytest.param(12, marks=pytest.mark.heavy)])
def test_damaged_files_of_every_kind_give_equal_rows(tmp_path, cache, turns):
    write(tmp_path / "one", 0)
    write(tmp_path / "two", 1)
    expected = {name: used(tmp_path / name) for name in ("one", "two")}
    kinds = {path.relative_to(cache).parts[0] for path in cache.rglob("*") if path.is_file()}
    assert kinds == {"content", "documents", "plans", "supervised", "orders", "openchat"}
    random = np.random.default_rng(5)
    tried = 0
    for turn in range(turns):
        for kind in DAMAGES if turns > 1 else DAMAGES[::2]:
            for path in sorted(cache.rglob("*")):  # all at once: a run meets them together
                if path.is_file() and path.suffix != ".lock":
                    damage(path, kind, random)
                    tried += 1
            for name, rows in expected.items() if turns > 1 else [("one", expected["one"])]:
                assert used(tmp_path / name) == rows, (kind, turn)
    print(f"{tried} damaged files")
    assert plan_files(dict(layouts_of(tmp_path / "one"))["eos"])
