"""Many pieces of mapped files are copied with the right values. A file that is cut during the copy is an error."""

import functools
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from grain_sft.errors import CorpusFileError
from grain_sft.storage import ShardReader, describe, shard_reader

PAGE = mmap.PAGESIZE


def together(count, work, act=lambda: None):
    """Run `work(number)` in `count` threads that begin together. Call `act()` in this thread while they run."""
    started = threading.Barrier(count + 1)
    with ThreadPoolExecutor(count) as pool:
        for number in range(count):
            pool.submit(lambda number=number: (started.wait(), work(number)))
        started.wait()
        act()


def gathered(reader, shards, starts, size):
    """Return a row of `size` values for each of `starts`."""
    out = np.empty((len(starts), size), np.uint32)
    places = np.arange(len(starts)) * 4 * size
    reader.gather(shards, starts, places, np.full(len(starts), 4 * size), out.reshape(-1).data.cast("B"))
    return out


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut while it was mapped"])
def test_thousands_of_pieces_are_copied_to_their_places(tmp_path, cut):
    values = np.arange(64 * PAGE // 4, dtype=np.uint32)
    values.tofile(tmp_path / "values")
    random = np.random.default_rng(1)
    sizes = random.integers(0, 40, 2500)
    starts = random.integers(0, len(values) - 40, 2500)
    places = np.cumsum(sizes + random.integers(0, 3, 2500) * random.integers(0, 2, 2500)) - sizes  # with gaps
    out, expected = np.zeros((2, places[-1] + 40), np.uint32)
    for start, place, size in zip(starts, places, sizes, strict=True):
        expected[place : place + size] = values[start : start + size]
    reader = ShardReader([describe(str(tmp_path / "values"))], 4)
    if cut:  # another program writes the same content again
        os.truncate(reader._open[0].shard.path, PAGE)
        reader._open[0].map()
        assert not reader._open[0].address
        values.tofile(tmp_path / "values")
    reader.gather(np.zeros(2500, np.int64), starts, 4 * places, 4 * sizes, out.data.cast("B"))
    assert (out == expected).all()


@pytest.mark.parametrize("copied", [True, False], ids=["one call", "no copy"])
def test_a_file_that_is_cut_while_threads_read_it_at_full_speed_is_an_error(tmp_path, copied, monkeypatch):
    """Each thread gets the error, and all values before it are right. In the case "no copy", pieces are read one by one."""
    if not copied:
        monkeypatch.setattr(shard_reader, "copy_pieces", lambda *given: False)

    def read(reader, errors, number):
        random, right = np.random.default_rng(number), True
        try:
            while right:
                starts = random.integers(0, 64 * PAGE // 4 - 100, 64)
                found = gathered(reader, np.zeros(64, np.int64), starts, 100)
                right = (found == starts[:, None] + np.arange(100)).all()
            errors.append("wrong values")
        except CorpusFileError as error:
            errors.append(str(error))

    for attempt in range(20):
        path, errors = tmp_path / f"{attempt}", []
        np.arange(64 * PAGE // 4, dtype=np.uint32).tofile(path)
        reader = ShardReader([describe(str(path))], 4)
        together(3, functools.partial(read, reader, errors), functools.partial(os.truncate, path, PAGE * attempt))
        assert len(errors) == 3 and all(f"{path}: the file shrank" in error for error in errors), errors


def test_threads_that_map_and_release_the_same_files_read_right_values(tmp_path):
    """A file stays open while a thread reads it or copies from its map, even if other threads have released it."""
    values = np.arange(16 * 16 * PAGE // 4, dtype=np.uint32).reshape(16, -1)
    for number, each in enumerate(values):
        each.tofile(tmp_path / f"{number}")
    stored, right = [describe(str(tmp_path / f"{number}")) for number in range(len(values))], []

    def read(reader, random, _):
        for _ in range(20):
            count = random.choice([4, 32])  # 4 pieces are read, 32 are copied from the map
            shards = random.integers(0, 16, count) // 4 * random.integers(1, 5)
            starts = random.integers(0, 10_000, count)
            expected = values[shards[:, None], starts[:, None] + np.arange(10)]
            right.append(np.array_equal(gathered(reader, shards, starts, 10), expected))

    for attempt in range(40):
        reader = ShardReader(stored, 4, max_open_files=12)
        together(4, functools.partial(read, reader, np.random.default_rng(attempt)))
    assert len(right) == 40 * 4 * 20 and all(right)
