"""Copies of many pieces of mapped files: right, and an error where a page is gone."""

from __future__ import annotations

import mmap
import os
import re
import threading

import numpy as np
import pytest

from grain_sft.errors import CorpusFileError
from grain_sft.storage import vectored_copy as many_pieces
from grain_sft.storage.file_stamp import describe
from grain_sft.storage.shard_reader import ShardReader

PAGE = mmap.PAGESIZE


def a_file(path, pages):
    values = np.arange(pages * PAGE // 4, dtype=np.uint32)
    values.tofile(path)
    return values


def test_thousands_of_pieces_are_copied_to_their_places(tmp_path):
    values = a_file(tmp_path / "values", 64)
    with (tmp_path / "values").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        base = np.frombuffer(held, np.uint8).ctypes.data
        random = np.random.default_rng(1)
        sizes = random.integers(0, 40, 2500)
        starts = random.integers(0, len(values) - 40, 2500)
        gaps = random.integers(0, 3, 2500) * random.integers(0, 2, 2500)
        places = np.cumsum(sizes + gaps) - sizes
        out = np.zeros(places[-1] + 40, np.uint32)
        expected = out.copy()
        for start, place, size in zip(starts, places, sizes, strict=True):
            expected[place : place + size] = values[start : start + size]
        assert many_pieces.copies(base + 4 * starts, 4 * places, 4 * (places + sizes), out.data.cast("B"))
        assert (out == expected).all()


def test_a_page_that_is_gone_is_told(tmp_path):
    """A plain copy of it would end this process."""
    a_file(tmp_path / "values", 8)
    with (tmp_path / "values").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        base = np.frombuffer(held, np.uint8).ctypes.data
        out = np.zeros(8 * PAGE, np.uint8)
        pages = np.arange(8) * PAGE
        pieces = base + pages, pages, pages + PAGE, out.data
        assert many_pieces.copies(*pieces)
        os.truncate(tmp_path / "values", 5 * PAGE)
        assert not many_pieces.copies(*pieces)


@pytest.mark.parametrize("offered", [True, False], ids=["one call", "no such call"])
def test_a_file_that_is_cut_while_threads_read_it_at_full_speed_is_an_error(tmp_path, offered, monkeypatch):
    """Of all of them, and every value before it is right; where a system offers no such call it is read."""
    if not offered:
        monkeypatch.setattr(many_pieces, "_pwritev", None)
    for attempt in range(20):
        path = tmp_path / f"{attempt}"
        values = a_file(path, 64)
        reader = ShardReader([describe(str(path))], 4)
        wrong, errors = [], []
        started = threading.Barrier(4)

        def read(reader=reader, values=values, wrong=wrong, errors=errors, started=started):
            out = np.empty(64 * 100, np.uint32)
            places = np.arange(64) * 400
            random = np.random.default_rng(threading.get_ident() % 1000)
            started.wait()
            try:
                while not wrong:
                    starts = random.integers(0, len(values) - 100, 64)
                    reader.gather(np.zeros(64, np.int64), starts, places, np.full(64, 400), out.data.cast("B"))
                    if (out.reshape(64, 100) != starts[:, None] + np.arange(100)).any():
                        wrong.append(starts)
            except CorpusFileError as found:
                errors.append(str(found))

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        started.wait()
        os.truncate(path, PAGE * attempt)
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(errors) == 3 and all(
            str(path) in error and re.search("cut short while|shrank", error) for error in errors
        )


def test_threads_that_map_and_let_go_of_the_same_files_read_right_values(tmp_path):
    """A map that one thread copies from stays until it is done, whoever maps the file at the same time, or lets go of it."""
    values = np.arange(16 * 16 * PAGE // 4, dtype=np.uint32).reshape(16, -1)
    for number, each in enumerate(values):
        each.tofile(tmp_path / f"{number}")
    stored = [describe(str(tmp_path / f"{number}")) for number in range(len(values))]
    wrong = []

    def read(reader, seed, started):
        random = np.random.default_rng(seed)
        out = np.empty((32, 10), np.uint32)
        started.wait()
        for _ in range(20):
            shards, starts = random.integers(0, 16, 32) // 4 * random.integers(1, 5), random.integers(0, 10_000, 32)
            reader.gather(shards, starts, np.arange(32) * 40, np.full(32, 40), out.reshape(-1).data.cast("B"))
            if (out != values[shards[:, None], starts[:, None] + np.arange(10)]).any():
                wrong.append((shards, starts))

    for attempt in range(40):
        reader = ShardReader(stored, 4, max_open_files=12)
        started = threading.Barrier(4)
        threads = [threading.Thread(target=read, args=(reader, 4 * attempt + number, started)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
