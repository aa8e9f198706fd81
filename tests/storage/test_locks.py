"""Writers remove temporary files of killed processes. A lock is freed even if a forked child of its holder still lives."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from grain_sft.errors import StorageError
from grain_sft.storage import atomic_file, files, locks

KILLED = """
import os, signal, sys
from grain_sft.storage import files
with files.atomic_write(sys.argv[1]) as file:
    file.write("half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_next_writer_in_a_folder_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    """Temporary files of other hosts, whose locks may not be visible here, are removed after a day."""
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "index.json")])
    assert result.returncode == -signal.SIGKILL and [name[-4:] for name in names_in(tmp_path)] == [".tmp"]
    similar = [".a.tmp", "a.00000000-1.01234567.tmp", ".vimrc.tmp", ".a.17.0123abcd.tmp", ".a.0000000x-1.01234567.tmp"]
    new, old = (f".a.{host}-7.01234567.tmp" for host in ("00000000", "00000001"))
    for name in (*similar, new, old):
        (tmp_path / name).write_text("mine")
    os.utime(tmp_path / old, (time.time() - 90_000, time.time() - 90_000))
    pipe = tmp_path / f".pipe.{atomic_file._host()}-1.01234567.tmp"
    os.mkfifo(pipe)
    with files.atomic_write(tmp_path / "first") as first:
        atomic_file._clean.cache_clear()  # as in a process that has cleaned nothing yet
        files.write_bytes(str(tmp_path / "second"), b"2")
        first.write("1")
    assert names_in(tmp_path) == sorted([*similar, new, pipe.name, "first", "second"])


def test_a_file_with_the_longest_possible_name_is_written(tmp_path):
    files.write_bytes(str(tmp_path / ("ü" * 127)), b"x")
    assert names_in(tmp_path) == ["ü" * 127]


def test_a_temporary_file_that_is_removed_is_made_again(tmp_path, monkeypatch):
    """Another process may remove the file before its writer locks it, as if the writer were dead."""
    lock, removed = atomic_file.HeldLock, []

    def remove_and_lock(fd, **options):
        if not removed:
            (path,) = tmp_path.iterdir()
            removed.append(path.name)
            path.unlink()
        return lock(fd, **options)

    monkeypatch.setattr(atomic_file, "HeldLock", remove_and_lock)
    files.write_bytes(str(tmp_path / "out"), b"x")
    assert removed and names_in(tmp_path) == ["out"]


def test_a_writer_that_may_open_no_more_files_fails_and_leaves_no_file(tmp_path, monkeypatch):
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    with monkeypatch.context() as patched, pytest.raises(StorageError, match="Too many open files"):
        patched.setattr(os, "dup", mock.Mock(side_effect=error))
        files.write_bytes(str(tmp_path / "out"), b"x")
    assert not names_in(tmp_path)


def is_free(path: Path) -> bool:
    return subprocess.run(["flock", "-n", path, "true"]).returncode == 0


def fork(work) -> int:
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    return child


HOLDER = """
import os, signal, sys, time
from pathlib import Path
from grain_sft.storage import files
with files.locked(Path(sys.argv[1])):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.write(write, b"x")
        time.sleep(60)
        os._exit(0)
    os.read(read, 1)
    print(child, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("killed", [False, True])
def test_a_lock_is_free_when_its_holder_is_done_or_killed_though_a_forked_child_lives(tmp_path, killed):
    if killed:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / "plan.arrays")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # the child keeps the pipe open
            child = int(process.stdout.readline())
            process.stdout.close()
        os.kill(child, 0)  # an error unless the child lives
    else:
        with files.locked(tmp_path / "plan.arrays"):
            child = fork(lambda: time.sleep(60))
            assert not is_free(tmp_path / "plan.lock")
    try:
        assert is_free(tmp_path / "plan.lock")
    finally:
        os.kill(child, signal.SIGKILL)
        if not killed:
            os.waitpid(child, 0)


def test_a_forked_child_frees_no_lock_of_its_parent(tmp_path):
    with files.locked(tmp_path / "plan.arrays"):
        os.waitpid(fork(lambda: [lock.release() for lock in list(locks._file_locks)]), 0)
        assert not is_free(tmp_path / "plan.lock")
