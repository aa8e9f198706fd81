"""An artifact, a file of arrays, is made once per machine or bucket, checked when it is opened, and mapped into memory."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import fsspec
import numpy as np
import pytest
from batches import assert_same
from failing_proxy import before_emulator, media_bytes

from grain_sft import PackedLayout, open_corpus
from grain_sft.errors import CorpusFileError, StorageError
from grain_sft.storage import artifact, files

DEPENDS = {"of": "this", "number": 3, "list": [1, None, 2.5]}
SPAWN = multiprocessing.get_context("spawn")


def arrays() -> dict[str, np.ndarray]:
    return {
        "ints": np.arange(1000, dtype=np.int64) ** 2,
        "small": np.array([[1, 2, 3], [4, 5, 6]], np.uint16),
        "none": np.zeros((0, 4), np.float32),
        "flags": np.arange(77) % 3 == 0,
    }


@pytest.fixture
def maker():
    return mock.Mock(side_effect=arrays)


@pytest.fixture
def made(tmp_path, maker) -> Path:
    """File of an artifact that `maker` has made once."""
    artifact.load_or_make("things", DEPENDS, maker, tmp_path)
    (found,) = (tmp_path / "things").glob("*.arrays")
    return found


def test_an_artifact_is_made_once_and_then_opened_and_mapped(made, maker):
    found = artifact.load_or_make("things", DEPENDS, maker, made.parents[1])
    assert_same(found, arrays())
    assert all(isinstance(found[name], np.memmap) for name in ("ints", "small", "flags"))
    assert all(not array.size or array.offset % 64 == 0 for array in found.values())
    with pytest.raises(ValueError, match="read-only"):
        found["ints"][0] = 1
    assert maker.call_count == 1
    assert made.read_bytes()[16:].startswith(b"{")


def test_each_set_of_dependencies_has_a_file_of_its_own(tmp_path, maker):
    changed = ({"number": 4}, {"list": [1, None, 2]}, {"of": "This"}, {"more": None})
    for depends in (DEPENDS, *({**DEPENDS, **each} for each in changed)):
        artifact.load_or_make("things", depends, maker, tmp_path)
    assert maker.call_count == len(list((tmp_path / "things").glob("*.arrays"))) == 5
    artifact.load_or_make("things", dict(reversed(DEPENDS.items())), maker, tmp_path)
    artifact.load_or_make("things", {**DEPENDS, "list": (1, None, 2.5)}, maker, tmp_path)
    assert maker.call_count == 5


def load_together(folder: Path, barrier) -> None:
    def make():
        (folder / f"made-by-{os.getpid()}").touch()
        time.sleep(0.5)
        return arrays()

    barrier.wait(300)
    assert_same(artifact.load_or_make("things", DEPENDS, make, folder), arrays())


def die_while_making(folder: Path) -> None:
    artifact.load_or_make("things", DEPENDS, lambda: os._exit(3), folder)


def exit_codes(count: int, function, *arguments) -> list[int]:
    """Call `function` in `count` processes at once. Return their exit codes."""
    processes = [SPAWN.Process(target=function, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
    return [process.exitcode for process in processes]


def test_processes_that_load_an_artifact_at_once_make_it_once(tmp_path):
    assert exit_codes(3, load_together, tmp_path, SPAWN.Barrier(3)) == [0] * 3
    assert len(list(tmp_path.glob("made-by-*"))) == 1
    assert sorted(path.suffix for path in (tmp_path / "things").iterdir()) == [".arrays", ".lock"]


def test_a_process_that_dies_while_it_makes_an_artifact_leaves_no_file_and_the_next_makes_it(tmp_path, maker):
    assert exit_codes(1, die_while_making, tmp_path) == [3]
    assert not list((tmp_path / "things").glob("*.arrays"))
    assert_same(artifact.load_or_make("things", DEPENDS, maker, tmp_path), arrays())
    assert maker.call_count == 1


def test_an_error_of_the_maker_reaches_the_caller_and_the_maker_is_called_once(tmp_path, caplog):
    fail = mock.Mock(side_effect=StorageError("a file of the maker's can't be read"))
    with pytest.raises(StorageError, match="of the maker's"):
        artifact.load_or_make("things", DEPENDS, fail, tmp_path)
    assert fail.call_count == 1 and not caplog.messages
    assert [path.suffix for path in (tmp_path / "things").iterdir()] == [".lock"]


def mutated(seed):
    """Return a function that flips a bit of the header or of the first array, or cuts the file anywhere."""

    def damage(data: bytearray) -> bytes:
        random, size = np.random.default_rng(seed), int.from_bytes(data[8:16], "little")
        if seed % 3 == 0:
            return data[: int(random.integers(0, len(data) - 64))]
        end = 16 + len(data[16 : 16 + size].rstrip()) if seed % 3 == 1 else 8000 + 16 + size
        data[int(random.integers(end))] ^= 1 << int(random.integers(8))
        return data

    return damage


def restated(change):
    """Return a function that changes the header, but not the checksum."""

    def damage(data: bytearray) -> bytes:
        size = int.from_bytes(data[8:16], "little")
        header = json.loads(data[16 : 16 + size])
        change(header)
        text = json.dumps(header).encode().ljust(size)
        return data[:8] + len(text).to_bytes(8, "little") + text + data[16 + size :]

    return damage


ODD_FIELDS = (
    *({"dtype": dtype} for dtype in ("<u8", "|O8", "u4,(")),
    *({"shape": shape} for shape in ([10, 100], [10**15], [-1], [float("inf")], None)),
    *({"at": at} for at in (-64, 10**30)),
)
CHANGES = (
    *(lambda header, field=field: header["arrays"]["ints"].update(field) for field in ODD_FIELDS),
    lambda header: header["arrays"].pop("flags"),
    lambda header: header.update(arrays=[]),
    lambda header: header.update(depends=3),
    lambda header: header["depends"].update(number=4),
    lambda header: header.pop("checksum"),
)
NESTED = artifact.MAGIC + (99_984).to_bytes(8, "little") + b"[" * 99_984
OTHERS = [b"", b"GSFTART1", b"\x93NUMPY" * 20, b"GSFTART1" + b"\xff" * 200, b"[" * 100_000, NESTED]
DAMAGES = [*map(mutated, range(60)), *map(restated, CHANGES), *(lambda data, other=other: other for other in OTHERS)]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_and_made_again(made, maker, caplog, damage):
    made.write_bytes(damage(bytearray(made.read_bytes())))
    with pytest.raises(StorageError, match=r"damaged \(.*\)\. If it is in the cache, delete it") as error:
        artifact.open_file(made)
    assert str(made) in str(error.value)
    for _ in range(2):
        assert_same(artifact.load_or_make("things", DEPENDS, maker, made.parents[1]), arrays())
    assert maker.call_count == 2 and len(caplog.messages) >= 1
    assert_same(artifact.open_file(made)[0], arrays())


def test_a_file_with_other_dependencies_than_its_name_states_is_replaced(made, maker, caplog):
    artifact.save(made, {"of": "that"}, {"ints": np.zeros(3)})
    assert_same(artifact.load_or_make("things", DEPENDS, maker, made.parents[1]), arrays())
    assert maker.call_count == 2
    assert "its dependencies do not match its name" in caplog.messages[0]


@pytest.mark.parametrize("error", [ValueError, CorpusFileError])
def test_arrays_that_fail_the_check_are_made_again_and_the_warning_states_it(made, maker, caplog, error):
    check = mock.Mock(side_effect=error("a file is missing"))
    assert_same(artifact.load_or_make("things", DEPENDS, maker, made.parents[1], check=check), arrays())
    assert maker.call_count == 2
    assert caplog.messages[0] == f"{made}: its checksum is right, but a file is missing; making it again."


def test_a_file_that_cannot_be_opened_for_a_moment_is_kept(made, maker, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(artifact, "open_regular", mock.Mock(side_effect=OSError(24, "Too many open files")))
        assert artifact.open_cached(made, DEPENDS) is None
    assert "Too many open files" in caplog.messages[0]
    assert_same(artifact.load_or_make("things", DEPENDS, maker, made.parents[1]), arrays())
    assert maker.call_count == 1


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere: can't be read \(No such file"):
        artifact.open_file(tmp_path / "nowhere")


@pytest.mark.parametrize("obstacle", ["a full disk", "a file", "a folder in its place", "a name that is too long"])
def test_an_artifact_is_made_in_memory_if_its_cache_is_not_writable(tmp_path, maker, caplog, monkeypatch, obstacle):
    cache = tmp_path / "cache"
    if obstacle == "a full disk":
        error = StorageError("the disk is full: $GRAIN_SFT_CACHE_DIR.")
        monkeypatch.setattr(artifact, "save", mock.Mock(side_effect=error))
    elif obstacle == "a file":
        cache.write_text("in the way")
    elif obstacle == "a name that is too long":  # `Path.exists` raises, as in a folder that can't be searched
        cache = tmp_path / ("long" * 100)
    else:
        artifact.place("things", DEPENDS, cache).mkdir(parents=True)
    assert_same(artifact.load_or_make("things", DEPENDS, maker, cache), arrays())
    assert maker.call_count == 1
    assert "Working without a cache" in caplog.messages[-1]
    assert "GRAIN_SFT_CACHE_DIR" in caplog.messages[-1] or obstacle == "a folder in its place"


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
    """Assert that the cache gives `arrays()`. If the cache lacks them, `make` makes them, and without `make` the test fails."""
    found = artifact.load_or_make("things", DEPENDS, make or pytest.fail, folder)
    assert_same(found, arrays())
    assert all(isinstance(array, np.memmap) for array in found.values() if array.size)


@pytest.mark.parametrize("folder", [None, "memory://shared/cache"], ids=["variable", "argument"])
def test_an_artifact_that_one_machine_made_is_copied_and_mapped_by_others(machine, monkeypatch, folder):
    if folder:
        monkeypatch.delenv("GRAIN_SFT_CACHE_DIR")
    assert_cached(arrays, folder)
    name = artifact.place("things", DEPENDS).name
    assert files.exists(f"memory://shared/cache/things/{name}")
    there = machine("two")
    assert_cached(folder=folder)
    assert (there / "things" / name).exists()
    fsspec.filesystem("memory").rm("/shared", recursive=True)
    assert_cached(folder=folder)  # from the copy of this machine


def test_a_damaged_artifact_in_the_bucket_is_made_again_and_replaced(machine):
    assert_cached(arrays)
    url = f"memory://shared/cache/things/{artifact.place('things', DEPENDS).name}"
    whole = files.read_bytes(url)
    files.write_bytes(url, whole[:-100] + bytes(100))
    machine("two")
    assert_cached(arrays)
    assert files.read_bytes(url) == whole


def test_a_machine_makes_an_artifact_itself_if_the_bucket_can_not_be_reached(machine, monkeypatch, caplog):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", "nosuch://bucket")
    assert_cached(arrays)
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
