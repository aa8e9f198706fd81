"""Machines share artifacts through a bucket. One machine makes an artifact, and each other machine copies it once."""

import os
import subprocess
import sys

import fsspec
import numpy as np
import pytest
from batches import assert_same
from failing_proxy import before_emulator, media_bytes

from grain_sft import PackedLayout, open_corpus
from grain_sft.storage import artifact, files

DEPENDS = {"of": "this"}
ARRAYS = {"ints": np.arange(1000), "flags": np.arange(7) % 2 == 0}

PLANNER = """
import sys
from grain_sft.corpus import open_corpus
from grain_sft.layout import PackedLayout
layout = PackedLayout(open_corpus(sys.argv[1], eos_token_id=0), 64)
print(len(layout), layout.spans(3)[0], flush=True)
"""


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """`machine(name)` makes this process act as the machine `name`, which has its own local cache."""

    def become(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
        return tmp_path / name / "grain_sft"

    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", "memory://shared/cache")
    become("one")
    yield become
    memory = fsspec.filesystem("memory")
    if memory.exists("/shared"):
        memory.rm("/shared", recursive=True)


def assert_cached(make=None, folder=None):
    """Assert that the cache gives `ARRAYS`. If the cache lacks them, `make` makes them, and without `make` the test fails."""
    found = artifact.load_or_make("things", DEPENDS, make or pytest.fail, folder)
    assert_same(found, ARRAYS)
    assert all(isinstance(array, np.memmap) for array in found.values())


@pytest.mark.parametrize("folder", [None, "memory://shared/cache"], ids=["variable", "argument"])
def test_an_artifact_that_one_machine_made_is_copied_and_mapped_by_others(machine, monkeypatch, folder):
    if folder:
        monkeypatch.delenv("GRAIN_SFT_CACHE_DIR")
    assert_cached(ARRAYS.copy, folder)
    name = artifact.place("things", DEPENDS).name
    assert files.exists(f"memory://shared/cache/things/{name}")
    there = machine("two")
    assert_cached(folder=folder)
    assert (there / "things" / name).exists()
    fsspec.filesystem("memory").rm("/shared", recursive=True)
    assert_cached(folder=folder)  # from the copy of this machine


def test_a_damaged_artifact_in_the_bucket_is_made_again_and_replaced(machine):
    assert_cached(ARRAYS.copy)
    url = f"memory://shared/cache/things/{artifact.place('things', DEPENDS).name}"
    whole = files.read_bytes(url)
    files.write_bytes(url, whole[:-100] + bytes(100))
    machine("two")
    assert_cached(ARRAYS.copy)
    assert files.read_bytes(url) == whole


def test_a_machine_makes_an_artifact_itself_if_the_bucket_can_not_be_reached(machine, monkeypatch, caplog):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", "nosuch://bucket")
    assert_cached(ARRAYS.copy)
    assert "Making it on this machine" in caplog.text and "Other machines will make it again" in caplog.text


def test_a_plan_is_made_once_for_all_machines_and_copied_once_to_each(client, machine, monkeypatch, write_tokens):
    tokens = np.random.default_rng(0).integers(0, 40, 20_000)
    write_tokens("data/0.npy", tokens)
    corpus = open_corpus(write_tokens("data/1.npy", tokens).parent, eos_token_id=0)
    monkeypatch.setenv("FSSPEC_GS_TOKEN", "anon")
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", "gs://bucket/plans")
    with before_emulator() as proxy:
        layout = PackedLayout(corpus, 64)
        kept = client.find("bucket/plans")
        assert len(kept) == 1 and not proxy.sent
        machine("two")
        command = [sys.executable, "-c", PLANNER, os.path.dirname(corpus.shards[0].path)]
        processes = [subprocess.Popen(command, stdout=-1, text=True) for _ in range(2)]
        assert {process.communicate()[0] for process in processes} == {f"{len(layout)} {layout.spans(3)[0]}\n"}
        assert media_bytes(proxy) == (client.info(kept[0])["size"],) * 2
        assert client.find("bucket/plans") == kept
        assert PackedLayout(corpus, 64, cache_dir="gs://bucket/plans").spans(3) == layout.spans(3)
