"""Artifacts: made once per machine, checked when opened, mapped by whoever needs them."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from absl import logging

from grain_sft import PackedLayout, open_corpus
from grain_sft.errors import StorageError
from grain_sft.storage import artifact

DEPENDS = {"of": "this", "number": 3, "list": [1, None, 2.5]}


def arrays() -> dict[str, np.ndarray]:
    return {
        "ints": np.arange(1000, dtype=np.int64) ** 2,
        "small": np.array([[1, 2, 3], [4, 5, 6]], np.uint16),
        "none": np.zeros((0, 4), np.float32),
        "flags": np.arange(77) % 3 == 0,
    }


def check(found: dict[str, np.ndarray]) -> None:
    expected = arrays()
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


class Maker:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.count += 1
        return arrays()


@pytest.fixture
def warnings(monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: said.append(text % values))
    return said


def the_file(folder: Path) -> Path:
    (found,) = (folder / "things").glob("*.arrays")
    return found


def test_what_was_made_is_opened_the_next_time_and_mapped(tmp_path):
    maker = Maker()
    for _ in range(3):
        found = artifact.load_or_make("things", DEPENDS, maker, tmp_path)
        check(found)
        assert all(isinstance(found[name], np.memmap) for name in ("ints", "small", "flags"))
        with pytest.raises(ValueError, match="read-only"):
            found["ints"][0] = 1
    assert maker.count == 1
    start = the_file(tmp_path).read_bytes()[16:]
    for array in found.values():
        assert not array.size or array.offset % 64 == 0
    assert start.startswith(b"{")


def test_other_dependences_are_other_files(tmp_path):
    maker = Maker()
    changed = ({"number": 4}, {"list": [1, None, 2]}, {"of": "This"}, {"more": None})
    for depends in (DEPENDS, *({**DEPENDS, **each} for each in changed)):
        artifact.load_or_make("things", depends, maker, tmp_path)
    assert maker.count == len(list((tmp_path / "things").glob("*.arrays"))) == 5
    artifact.load_or_make("things", dict(reversed(DEPENDS.items())), maker, tmp_path)
    artifact.load_or_make("things", {**DEPENDS, "list": (1, None, 2.5)}, maker, tmp_path)
    assert maker.count == 5


def want(folder: str, barrier) -> None:
    def make():
        Path(folder, f"made-by-{os.getpid()}").touch()
        time.sleep(0.5)
        return arrays()

    barrier.wait(300)
    check(artifact.load_or_make("things", DEPENDS, make, Path(folder)))
    Path(folder, f"had-by-{os.getpid()}").touch()


def test_six_processes_that_want_it_at_once_make_it_once(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    barrier = spawn.Barrier(6)
    processes = [spawn.Process(target=want, args=(str(tmp_path), barrier)) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(400)
    assert [process.exitcode for process in processes] == [0] * 6
    assert len(list(tmp_path.glob("had-by-*"))) == 6
    assert len(list(tmp_path.glob("made-by-*"))) == 1
    assert sorted(path.suffix for path in (tmp_path / "things").iterdir()) == [".arrays", ".lock"]


def die(folder: str) -> None:
    artifact.load_or_make("things", DEPENDS, lambda: os._exit(3), Path(folder))


def test_a_maker_that_dies_leaves_nothing_and_the_next_makes_it(tmp_path):
    process = multiprocessing.get_context("spawn").Process(target=die, args=(str(tmp_path),))
    process.start()
    process.join(400)
    assert process.exitcode == 3
    assert not list((tmp_path / "things").glob("*.arrays"))
    maker = Maker()
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 1


def test_an_error_of_the_maker_is_the_callers_and_it_is_asked_once(tmp_path, warnings):
    asked = []

    def fail():
        asked.append(1)
        raise StorageError("a file of the maker's can't be read")

    with pytest.raises(StorageError, match="of the maker's"):
        artifact.load_or_make("things", DEPENDS, fail, tmp_path)
    assert len(asked) == 1 and not warnings
    assert [path.suffix for path in (tmp_path / "things").iterdir()] == [".lock"]


@pytest.mark.parametrize("seed", range(60))
def test_a_mutant_is_refused_with_a_sentence_and_made_again(tmp_path, warnings, seed):
    """Any byte flipped (beside padding between arrays), the file cut anywhere, or some of it gone."""
    maker = Maker()
    artifact.load_or_make("things", DEPENDS, maker, tmp_path)
    path, random = the_file(tmp_path), np.random.default_rng(seed)
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[8:16], "little")
    if seed % 3 == 0:
        del data[int(random.integers(0, len(data) - 64)) :]
    else:
        at = int(random.integers(0, (16 + len(data[16 : 16 + size].rstrip())) if seed % 3 == 1 else 8000 + 16 + size))
        data[at] ^= 1 << int(random.integers(8))
    path.write_bytes(data)
    try:
        check(artifact.open_file(path)[0])
    except StorageError as error:
        assert str(path) in str(error) and "Delete it; it will be made again" in str(error)
    else:
        raise AssertionError(f"a mutant was taken for whole (byte {at})")
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 2 and len(warnings) >= 1
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 2


def change_header(path: Path, change) -> None:
    data = path.read_bytes()
    size = int.from_bytes(data[8:16], "little")
    header = json.loads(data[16 : 16 + size])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (size - len(text))
    path.write_bytes(data[:8] + len(text).to_bytes(8, "little") + text + data[16 + size :])


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header["arrays"]["ints"].update(dtype="<u8"),
        lambda header: header["arrays"]["ints"].update(dtype="|O8"),
        lambda header: header["arrays"]["ints"].update(dtype="u4,("),
        lambda header: header["arrays"]["ints"].update(shape=[10, 100]),
        lambda header: header["arrays"]["ints"].update(shape=[10**15]),
        lambda header: header["arrays"]["ints"].update(shape=[-1]),
        lambda header: header["arrays"]["ints"].update(shape=[float("inf")]),
        lambda header: header["arrays"]["ints"].update(shape=None),
        lambda header: header["arrays"]["ints"].update(at=-64),
        lambda header: header["arrays"]["ints"].update(at=10**30),
        lambda header: header["arrays"].pop("flags"),
        lambda header: header.update(arrays=[]),
        lambda header: header.update(depends=3),
        lambda header: header["depends"].update(number=4),
        lambda header: header.pop("checksum"),
    ],
)
def test_a_header_that_says_something_else_is_refused_and_the_file_made_again(tmp_path, warnings, change):
    maker = Maker()
    artifact.load_or_make("things", DEPENDS, maker, tmp_path)
    change_header(the_file(tmp_path), change)
    with pytest.raises(StorageError, match=r"damaged \(.*\)\. Delete it"):
        artifact.open_file(the_file(tmp_path))
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 2 and warnings
    check(artifact.open_file(the_file(tmp_path))[0])


@pytest.mark.parametrize("data", [b"", b"GSFTART1", b"\x93NUMPY" * 20, b"GSFTART1" + b"\xff" * 200, b"[" * 100_000])
def test_a_file_of_another_kind_is_refused_and_replaced(tmp_path, warnings, data):
    maker = Maker()
    artifact.load_or_make("things", DEPENDS, maker, tmp_path)
    the_file(tmp_path).write_bytes(data)
    with pytest.raises(StorageError, match="damaged"):
        artifact.open_file(the_file(tmp_path))
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 2
    nested = b"[" * 99_984
    the_file(tmp_path).write_bytes(b"GSFTART1" + len(nested).to_bytes(8, "little") + nested)
    with pytest.raises(StorageError, match="damaged"):
        artifact.open_file(the_file(tmp_path))


def test_a_file_of_other_dependences_under_this_name_is_replaced(tmp_path, warnings):
    maker = Maker()
    artifact.load_or_make("things", DEPENDS, maker, tmp_path)
    artifact.save(the_file(tmp_path), {"of": "that"}, {"ints": np.zeros(3)})
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 2
    assert "depends on other things than its name says" in warnings[0]


def test_a_missing_file_is_a_sentence(tmp_path):
    with pytest.raises(StorageError, match=r"nowhere: can't be opened \(No such file"):
        artifact.open_file(tmp_path / "nowhere")


@pytest.mark.parametrize("full", [False, True])
def test_where_the_cache_cannot_be_written_to_it_is_made_in_memory_once(tmp_path, warnings, monkeypatch, full):
    def fail(*_):
        raise StorageError("the disk is full: $GRAIN_SFT_CACHE_DIR.")

    if full:
        monkeypatch.setattr(artifact, "save", fail)
    else:
        (tmp_path / "cache").write_text("in the way")
    maker = Maker()
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path / "cache"))
    assert maker.count == 1
    assert "Working without a cache" in warnings[0] and "GRAIN_SFT_CACHE_DIR" in warnings[0]


def test_a_folder_in_its_place_is_no_reason_to_stop(tmp_path, warnings):
    artifact.place("things", DEPENDS, tmp_path).mkdir(parents=True)
    maker = Maker()
    check(artifact.load_or_make("things", DEPENDS, maker, tmp_path))
    assert maker.count == 1 and warnings


def write_corpus(folder: Path):
    tokens = np.random.default_rng(0).integers(1, 50, 5000).astype(np.uint16)
    tokens[-1] = 1
    tokens.tofile(folder / "a.npy")
    return open_corpus(folder / "a.npy", dtype="uint16", eos_token_id=1)


def layout_rows(layout):
    return [layout.spans(row) for row in range(len(layout))]


def test_a_damaged_plan_is_made_again_and_one_in_memory_has_the_same_rows(tmp_path, warnings):
    corpus = write_corpus(tmp_path)
    expected = layout_rows(PackedLayout(corpus, 128, cache_dir=tmp_path / "cache"))
    (plan,) = (tmp_path / "cache").rglob("*.arrays")
    data = bytearray(plan.read_bytes())
    data[-1000] ^= 1
    plan.write_bytes(data)
    assert layout_rows(PackedLayout(corpus, 128, cache_dir=tmp_path / "cache")) == expected
    assert "its arrays are not those that were written" in warnings[0]
    assert layout_rows(PackedLayout(corpus, 128, cache_dir=tmp_path / "a.npy")) == expected
    assert "Working without a cache" in warnings[-1]


def test_a_plan_of_changed_tokens_is_another(tmp_path):
    corpus = write_corpus(tmp_path)
    PackedLayout(corpus, 128, cache_dir=tmp_path / "cache")
    tokens = np.fromfile(tmp_path / "a.npy", np.uint16)
    tokens[:10] = 1
    tokens.tofile(tmp_path / "a.npy")
    changed = open_corpus(tmp_path / "a.npy", dtype="uint16", eos_token_id=1)
    layout = PackedLayout(changed, 128, cache_dir=tmp_path / "cache")
    assert layout.statistics["documents"] == int((tokens == 1).sum())
    assert len(list((tmp_path / "cache").rglob("*.arrays"))) == 2
