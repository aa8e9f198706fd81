"""Local files that are no regular files are named at once, and a short read is read on."""

from __future__ import annotations

import os
import socket
import threading

import numpy as np
import pytest

import grain_sft
from grain_sft.storage import ShardReader, files, read_regular


def error_of(function, *arguments):
    """The text of the GrainSftError that `function` raises; what hangs fails instead of holding up the suite."""
    found = []

    def call():
        try:
            function(*arguments)
            found.append("nothing was raised")
        except grain_sft.GrainSftError as error:
            found.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(300)
    assert found, "hangs"
    return found[0]


CORPORA, CONFIGS = ("t.npy", "t.bin", "mix.txt", "mix", "index.json"), ("config.yaml", "config.json")
PARTS = ("token_ids_part_0000.npy", "labels_mask_part_0000.npy", "token_ids_part_0000.csv.gz")


@pytest.mark.parametrize("name", [*CORPORA, *CONFIGS, *PARTS])
def test_a_fifo_in_place_of_a_file_is_named_at_once(tmp_path, name):
    where = tmp_path / name
    if name in PARTS:
        np.arange(40, dtype=np.uint32).tofile(tmp_path / "token_ids_part_0000.npy")
        np.ones(40, np.uint8).tofile(tmp_path / "labels_mask_part_0000.npy")
        where.unlink(missing_ok=True)
        where = tmp_path
    os.mkfifo(tmp_path / name)
    if name in CONFIGS:
        assert "it is a FIFO" in error_of(grain_sft.load, where)
        return
    for place in (where, [where]) if name.endswith((".npy", ".bin")) and name not in PARTS else (where,):
        message = error_of(lambda place=place: grain_sft.open_corpus(place, dtype="uint32").documents)
        assert f"{name}: can't be read, since it is a FIFO" in message


def test_a_fifo_in_place_of_a_file_that_was_opened_is_named_at_once(write_tokens):
    path = write_tokens("t.npy", np.arange(1000))
    corpus = grain_sft.open_corpus(path)
    path.unlink()
    os.mkfifo(path)
    assert "t.npy: can't be read, since it is a FIFO" in error_of(corpus.read, 0, 10)


def test_directories_sockets_and_devices_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path, kind in ((".", "a directory"), ("socket", "a socket"), ("/dev/zero", "a device")):
            expected = f"{path}: can't be read, since it is {kind}; expected a regular file"
            assert expected in error_of(files.read_bytes, path)
            assert expected in error_of(files.read_range, path, 0, 8)


def test_short_reads_are_read_on(write_tokens, monkeypatch):
    path = write_tokens("t.npy", np.arange(50_000))
    corpus = grain_sft.open_corpus(path)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: pread(fd, min(count, 1000), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [view[:1000] for view in views[:1]], offset))
    assert grain_sft.open_corpus(path) == corpus
    assert files.read_bytes(str(path)) == np.arange(50_000, dtype=np.uint32).tobytes()
    reader = ShardReader(corpus.shards, 4)
    out = np.empty(20_000, np.uint32)
    reader.gather([0], [7], [0], [out.nbytes], out.data.cast("B"))
    np.testing.assert_array_equal(out, np.arange(7, 20_007))
    assert read_regular(path, 199_996, 1 << 20) == np.uint32(49_999).tobytes()
