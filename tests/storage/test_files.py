"""A file that is written appears whole or not at all, and only regular files are read."""

import functools
import os
import re
import socket
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import grain_sft
from grain_sft.errors import CorpusFileError, StorageError
from grain_sft.storage import ShardReader, files, read_regular


def listing(folder):
    return sorted(os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)


@pytest.mark.parametrize(("mode", "text"), [("w", "zwölf\n"), ("wb", b"\xff\0")])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_file_appears_whole_when_the_with_block_ends(tmp_path, mode, text, old):
    path = tmp_path / "a" / "b" / "out.txt"
    if old:
        path.parent.mkdir(parents=True)
        path.write_bytes(old)
    with files.atomic_write(path if old else str(path), mode) as file:
        file.write(text)
        file.flush()
        assert path.read_bytes() == old if old else not path.exists()
    assert path.read_bytes() == (text if mode == "wb" else text.encode())
    assert listing(tmp_path) == [str(path)]
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)


FULL_DISK = OSError(28, "No space left"), StorageError, r"/out\.txt: can't be written \(No space left\)"
OTHERS = (RuntimeError("no"), KeyboardInterrupt("no"), CorpusFileError("shard 3 is gone"))
FAILURES = [FULL_DISK, *((error, type(error), f"^{error}$") for error in OTHERS)]


@pytest.mark.parametrize(("failure", "raised", "message"), FAILURES)
@pytest.mark.parametrize("old", ["old", None])
def test_an_exception_in_the_with_block_leaves_the_old_file_and_nothing_else(tmp_path, failure, raised, message, old):
    path = tmp_path / "out.txt"
    if old:
        path.write_text(old)
    before = listing(tmp_path)
    with pytest.raises(raised, match=message), files.atomic_write(path) as file:
        file.write("new")
        raise failure
    assert listing(tmp_path) == before
    assert not old or path.read_text() == old


@pytest.mark.parametrize("target", ["file/out.txt", "file/deeper/out.txt", "folder", "x" * 300, "device", "pipe"])
def test_writing_where_no_file_can_be_is_a_storage_error(tmp_path, target):
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "pipe").symlink_to("fifo")  # /dev/stdout can be such a link
    before = listing(tmp_path)
    with pytest.raises(StorageError, match="can't be written") as error, files.atomic_write(tmp_path / target) as file:
        file.write("new")
    assert isinstance(error.value, grain_sft.GrainSftError) and isinstance(error.value, OSError)
    assert str(tmp_path / target) in str(error.value)
    assert listing(tmp_path) == before and (tmp_path / "device").is_char_device()
    assert (tmp_path / "pipe").is_fifo()
    if target != "x" * 300:
        for path in (str(tmp_path / target), "/dev/stdout"):  # pytest's stdout is a file
            with pytest.raises(StorageError, match="can't be written"):
                files.check_writable(path)


@pytest.mark.parametrize("folder", ["gs://bucket/c", "gs://bucket/c/", "/c/", "/"])
def test_an_output_that_is_a_folder_of_inputs_is_refused(folder):
    with pytest.raises(StorageError, match="is an input, which the output"):
        files.check_inputs_stay(folder, [f"{folder.rstrip('/')}/a.npy"])


def test_paths_with_a_tilde_and_file_urls_are_written_to_local_files(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for path in ("~/a.json", f"file://{tmp_path}/home/b.json"):
        files.write_bytes(path, b"1")
    assert listing(tmp_path) == [str(tmp_path / "home" / name) for name in ("a.json", "b.json")]


def test_a_glob_that_reaches_a_folder_twice_is_refused(tmp_path):
    (tmp_path / "data/part").mkdir(parents=True)
    (tmp_path / "data/part/a.npy").touch()
    (tmp_path / "data/b.npy").symlink_to("part/a.npy")
    pattern = f"{tmp_path}/data/**/*.npy"
    assert files.glob(pattern) == [f"{tmp_path}/data/b.npy", f"{tmp_path}/data/part/a.npy"]
    for target in (".", "part"):
        link = tmp_path / "data/link"
        link.symlink_to(target)
        with pytest.raises(CorpusFileError, match=r"is the same folder as .* would be read twice"):
            files.glob(pattern)
        link.unlink()


def test_a_remote_file_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    url = "memory://written/out.txt"
    with pytest.raises(RuntimeError), files.atomic_write(url) as file:
        file.write("half")
        raise RuntimeError
    assert not files.exists(url)
    with files.atomic_write(url) as file:
        file.write("whole \u00e9")
    assert files.read_text(url) == "whole \u00e9" and files.size(url) == 8 and files.read_range(url, 2, 4) == b"ol"
    assert not list(tmp_path.iterdir())


def test_two_writers_at_once_leave_one_of_their_files_whole(tmp_path):
    path = tmp_path / "out.txt"
    barrier = threading.Barrier(8, timeout=300)

    def write(number):
        with files.atomic_write(path) as file:
            file.write(str(number) * 100_000)
            barrier.wait()

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert path.read_text() in {str(number) * 100_000 for number in range(8)}
    assert listing(tmp_path) == [str(path)]


def test_all_urls_except_file_urls_are_remote_and_other_paths_are_local(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    changed = [("file:///a/b.npy", "/a/b.npy"), ("~/a.npy", "/home/me/a.npy"), (Path("a") / "b.npy", "a/b.npy")]
    local = [*changed, *((path, path) for path in ("a/b.npy", "C://a.npy", "/odd/x://y"))]
    for path, normal in local:
        assert not files.is_remote(os.fspath(path)) and files.normalize(path) == normal, path
    for url in ("gs://bucket/a.npy", "s3://bucket/~/a.npy"):
        assert files.is_remote(url) and files.normalize(url) == url, url
        with pytest.raises(grain_sft.GrainSftError, match="npy: expected two slashes"):
            files.write_bytes(Path(url), b"")


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_text_is_utf_8_with_or_without_a_byte_order_mark(tmp_path, mark):
    (tmp_path / "a.txt").write_bytes(mark + "zwölf".encode())
    assert files.read_text(str(tmp_path / "a.txt")) == "zwölf"


@pytest.mark.parametrize(
    ("name", "expected"),
    [("none", "no such file"), ("", "can't be read"), ("a\0b", "can't be read"), ("latin", "byte 2 is not UTF-8")],
)
def test_the_error_of_a_text_that_cannot_be_read_names_the_file(tmp_path, name, expected):
    (tmp_path / "latin").write_bytes("zwölf".encode("latin1"))
    path = os.path.join(tmp_path, name)
    with pytest.raises(CorpusFileError, match=f"(?s){re.escape(path)}.*{expected}"):
        files.read_text(path)


def test_environment_variables_set_the_folder_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(files.CACHE_DIR_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert files.cache_dir() == tmp_path / ".cache" / "grain_sft"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert files.cache_dir() == tmp_path / "xdg" / "grain_sft"
    monkeypatch.setenv(files.CACHE_DIR_VARIABLE, "~/mine")
    assert files.cache_dir() == tmp_path / "mine"


def error_of(function, *arguments):
    """Call a function that must raise a GrainSftError that is an OSError. Return its message."""
    with pytest.raises(grain_sft.GrainSftError) as error:
        function(*arguments)
    assert isinstance(error.value, OSError)
    return str(error.value)


CORPORA, CONFIGS = ("t.npy", "t.bin", "mix.txt", "mix", "index.json"), ("config.yaml", "config.json")
PARTS = ("token_ids_part_0000.npy", "labels_mask_part_0000.npy", "token_ids_part_0000.csv.gz")


@pytest.mark.parametrize("name", [*CORPORA, *CONFIGS, *PARTS])
def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path, name):
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


def test_a_fifo_that_replaces_a_file_of_an_open_corpus_is_refused_at_once(write_tokens):
    path = write_tokens("t.npy", np.arange(1000))
    corpus = grain_sft.open_corpus(path)
    path.unlink()
    os.mkfifo(path)
    assert "t.npy: can't be read, since it is a FIFO" in error_of(corpus.read, 0, 10)


def test_directories_sockets_and_devices_are_refused_with_their_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("socket")
        for path, kind in ((".", "a directory"), ("socket", "a socket"), ("/dev/zero", "a device")):
            expected = f"{path}: can't be read, since it is {kind}; expected a regular file"
            assert expected in error_of(files.read_bytes, path)
            assert expected in error_of(files.read_range, path, 0, 8)


def test_a_read_that_returns_fewer_bytes_than_requested_is_continued(write_tokens, monkeypatch):
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


def test_a_remote_file_whose_server_states_no_size_is_refused(monkeypatch):
    fsspec.filesystem("memory").pipe("/unsized", b"12345")
    info = MemoryFileSystem.info
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *path, **options: info(*path, **options) | {"size": None})
    for read in (files.read_bytes, functools.partial(files.read_range, start=0, stop=9)):
        with pytest.raises(CorpusFileError, match="memory://unsized: its server doesn't state its size"):
            read("memory://unsized")
