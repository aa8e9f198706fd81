"""A full or read-only disk is an error of one sentence, and no unfinished file has a final name. A run goes on if it can.

The full disk is a tmpfs of 24 KiB if one can be mounted (a real ENOSPC), or else a limit on a file's size (a real EFBIG).
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from children import run, write_corpus_and_tokenizer
from prepared import write_chats
from sft_files import EOS

import grain_sft
from grain_sft.layout.report import plan_files

BEGIN = f"""
import json, resource, shutil, signal
from pathlib import Path
import grain_sft
from grain_sft.errors import GrainSftError, StorageError
from grain_sft.layout import PackedLayout
from grain_sft.prepare.materialize import materialize
from grain_sft.prepare import Dataset, Request, prepare

data, disk, limit, nobody = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
corpus = grain_sft.open_corpus(data / "olmo", eos_token_id={EOS})

def make_index():
    corpus.save(disk / "index.json")

def make_plan():
    return PackedLayout(corpus, 64, cache_dir=disk / "cache")

def make_rows():
    materialize(PackedLayout(corpus, 64, cache_dir=data / "cache"), disk / "rows", shard_bytes=1 << 14)

def make_corpus():
    request = Request((Dataset((str(data / "chats.jsonl"),)),), "primer", str(data / "spm.model"), "primer")
    prepare(request, disk / "prepared", workers=1)

def make_order():
    return grain_sft.IndexSampler(1 << 21, global_batch_size=8, seed=3, order="olmo", cache_dir=disk / "orders").rows(0)

def make_audit(folder=disk):
    source = grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, 16))
    sampler = grain_sft.IndexSampler(len(source), global_batch_size=4, seed=0)
    list(zip(range(2000), grain_sft.Pipeline(source, sampler, [], audit=folder / "audit").iter(threads=0)))

MAKERS = dict(index=make_index, plan=make_plan, rows=make_rows, corpus=make_corpus, order=make_order, audit=make_audit)

def restrict():
    if limit:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    if nobody:
        os.setgroups([])
        os.setgid(nobody)
        os.setuid(nobody)

make_audit(data)  # imports now what is imported late: a child that runs as another user may be unable to read the packages
for name in sys.argv[5].split(","):
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == 0, name
        continue
    restrict()
    try:
        made = MAKERS[name]()
        outcome = f"made {{0 if made is None else len(made)}}"
    except GrainSftError as error:
        outcome = f"{{type(error).__name__}} {{error}}"
    left = [str(path.relative_to(disk)) for path in disk.rglob("*") if path.is_file()]
    print(json.dumps([name, outcome, left]), flush=True)
    for path in [] if nobody else disk.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os._exit(0)
"""
"""A program that runs each maker in a forked child, and prints its outcome and the files that it left."""

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def open_folder():
    """A folder that any user may enter. pytest's own folders won't do: each start of pytest closes them to other users."""
    with tempfile.TemporaryDirectory(prefix="grain_sft_test_") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="module")
def data(open_folder):
    folder = open_folder / "data"
    write_corpus_and_tokenizer(folder)
    write_chats(folder / "chats.jsonl", 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAIN_SFT_CACHE_DIR", str(folder / "cache"))
        assert plan_files(grain_sft.PackedLayout(grain_sft.open_corpus(folder / "olmo", eos_token_id=EOS), 64))
    for path in (folder, folder / "olmo", folder / "cache", *(folder / "cache").rglob("*")):
        path.chmod(0o777)
    return folder


@pytest.fixture
def full_disk(tmp_path):
    """(folder, limit): a folder of 24 KiB, and 0. Where none can be mounted, `limit` is the largest size of a file in bytes."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24k", "none", str(folder)]
    mounted = shutil.which("mount") and not subprocess.run(command, capture_output=True).returncode
    try:
        yield folder, 0 if mounted else 12_000
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def make(data, disk, names, limit=0, nobody=0):
    """Return (outcome, files left) of each maker, by its name."""
    lines = run(BEGIN, data, disk, limit, nobody, ",".join(names), env={"GRAIN_SFT_CACHE_DIR": str(data / "cache")})
    return {name: (text, left) for name, text, left in map(json.loads, lines.splitlines())}


def test_a_full_disk_is_an_error_and_no_unfinished_file_has_a_final_name(data, full_disk, tmp_path):
    disk, limit = full_disk
    found = make(data, disk, ["rows", "corpus", "order", "plan", "audit"], limit)
    for name in ("rows", "corpus", "order"):
        text, left = found[name]
        assert text.startswith("StorageError") and str(disk) in text, text
        made = ("rows/", "prepared/"), (".tmp", ".arrays")
        assert not [path for path in left if path.startswith(made[0]) or path.endswith(made[1])], left
    text, left = found["plan"]  # a plan that can't be stored is kept in memory
    rows = len(grain_sft.PackedLayout(grain_sft.open_corpus(data / "olmo", eos_token_id=EOS), 64, cache_dir=tmp_path))
    assert text == f"made {rows}" and not [path for path in left if not path.endswith(".lock")], left
    text, left = found["audit"]  # the run goes on without its log, or ends with a sentence
    assert text.startswith("made") or (text.startswith("StorageError") and str(disk) in text), text
    room = tmp_path / "room"
    room.mkdir()
    assert [text[:4] for text, _ in make(data, room, ["rows", "corpus"]).values()] == ["made", "made"]


@AS_ROOT
def test_writing_to_a_read_only_folder_is_an_error_except_for_plans(data, open_folder):
    """The user nobody writes, because root may write to a read-only folder."""
    disk = open_folder / "disk"
    disk.mkdir()
    disk.chmod(0o555)
    for name, (text, left) in make(data, disk, ["index", "plan", "rows", "corpus", "audit"], nobody=65534).items():
        assert not left
        expected = "made" if name == "plan" else f"StorageError {disk}"
        assert text.startswith(expected) and (name == "plan" or "Permission denied" in text), text


@AS_ROOT
def test_a_shard_that_may_not_be_read_is_named(data, open_folder):
    folder = open_folder / "olmo"
    shutil.copytree(data / "olmo", folder)
    path = folder / "token_ids_part_0001.npy"
    path.chmod(0o000)
    program = """
import concurrent.futures.thread  # imported first: the user below may be unable to read Python's own files
os.setuid(65534)
try:
    open_corpus(sys.argv[1])
except OSError as error:
    print(type(error).__name__, error)
"""
    found = run(program, folder)
    assert found.startswith(f"CorpusFileError {path}") and "Permission denied" in found
