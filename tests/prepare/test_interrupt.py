"""A run of `prepare` that is killed at any moment and started again writes the bytes of an uninterrupted run."""

import errno
import functools
import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
from prepared import record, texts_of
from python_runs import run_python
from record_files import KINDS

from grain_sft.errors import StorageError
from grain_sft.prepare import target

KILLS = int(os.environ.get("GRAIN_SFT_KILLS", "4"))
"""Number of kills in some cases below. `GRAIN_SFT_KILLS=50 pytest tests/prepare/test_interrupt.py` takes some minutes."""

_PROGRAM = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, prepare
from grain_sft.storage import atomic_file
from grain_sft.prepare.records import inputs
from prepared import digests, save_trained

inputs.GROUP_BYTES = 1  # each unit (a file or a part of it) gets its own chunk file
folder, format, workers, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = save_trained(folder, (*CHAT_TOKENS, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"))
options = {"template": "primer", "max_length": 60} | json.loads(sys.argv[5])
[a], [b] = (map(str, folder.glob(pattern)) for pattern in ("a.*", "b.*"))
request = Request(
    (Dataset((a,), "2.5"), Dataset((b,), "0.5")), tokenizer=str(model), format=format,
    val_frac=0.1, part_bytes=20_000, shard_tokens=15_000, on_error="skip", **options,
)

def run(out):
    atomic_file._clean.cache_clear()  # as in a new process
    prepare(request, out, workers=workers)

begin = time.perf_counter()
run(folder / "whole")
longest = time.perf_counter() - begin
expected = digests(folder / "whole")
draw = random.Random(f"{format} {workers}")
unfinished = 0
for number in range(kills):
    out = folder / f"out-{number}"
    while True:
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            run(out)
            os._exit(0)
        time.sleep(draw.uniform(0, longest))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if not out.exists() or draw.random() < 0.5:
            break
    unfinished += not out.exists()
    assert not out.exists() or (out / "prepare.json").exists(), "a half-made corpus"
    run(out)
    assert digests(out) == expected, number
    if workers == 1:
        assert not list(folder.glob(f".{out.name}.*"))
    shutil.rmtree(out)
print(f"{kills} killed, {unfinished} of them before the end, {longest:.2f} s")
"""


def write(path: Path, template: str, count: int) -> None:
    """Write `count` texts, or chats with a few broken ones. The suffixes of `path` state the kind of file, as in "a.jsonl.gz".

    With ".folder", each text is a file in a folder.
    """
    records = [record(number) if number % 97 != 5 else {"broken": number} for number in range(count)]
    if template == "text":
        records = [{"text": text} for text in texts_of(count, count)]
    if path.suffix == ".folder":
        path.mkdir()
        for number, each in enumerate(records):
            (path / f"{number}.txt").write_text(each["text"])
    else:
        path.write_bytes(KINDS[path.name.partition(".")[2]](records))


TEXT = {"template": "text", "fim_rate": 0.5, "empty": "keep", "max_length": 150}
LINES = ("a.jsonl", "b.jsonl")
CASES = [  # options, format, workers, kills, names of the two inputs
    ({}, "olmo", 2, 2, LINES),
    ({}, "openchat", 1, KILLS, ("a.jsonl.gz", "b.json")),
    (TEXT, "olmo", 1, 3, ("a.jsonl", "b.array_record")),
    (TEXT, "megatron", 1, 2, ("a.arrow", "b.jsonl")),
]
HEAVY = [({}, format, 1, KILLS, LINES) for format in ("olmo", "episodes", "primer")]
HEAVY += [
    (TEXT, format, 1, 25, names)
    for format in ("olmo", "megatron")
    for names in (("a.jsonl.gz", "b.arrow"), ("a.array_record", "b.folder"))
]


@pytest.mark.parametrize(
    ("options", "format", "workers", "kills", "names"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.heavy) for case in HEAVY)],
)
def test_a_run_that_is_killed_and_started_again_writes_the_same_bytes(tmp_path, options, format, workers, kills, names):
    for name, count in zip(names, (40 * kills, 10 * kills) if options else (1500, 600), strict=True):
        write(tmp_path / name, options.get("template", ""), count)
    arguments = (tmp_path, format, workers, kills, json.dumps(options))
    print(run_python("-c", _PROGRAM, *arguments, timeout=900, PYTHONPATH=str(Path(__file__).parent)).stdout)


def test_a_run_locks_a_new_work_folder_if_another_run_has_deleted_the_old_one(tmp_path, monkeypatch):
    produce = functools.partial(target.Target(tmp_path / "out").produce, {"key": "same"}, overwrite=False)
    work, exclusive, locked = tmp_path / ".out.grain_sft-work", target.exclusive, []

    def exclusive_after_discard(fd, *arguments, **options):
        if not locked:
            shutil.rmtree(work)  # as another run does, after this run opened the folder and before it locks it
        locked.append(fd)
        return exclusive(fd, *arguments, **options)

    def make():
        with pytest.raises(StorageError, match="is being prepared by another process"):
            produce(dict)
        (work / "corpus").mkdir()
        return {}

    monkeypatch.setattr(target, "exclusive", exclusive_after_discard)
    assert produce(make) == {} and len(locked) == 3  # the old folder, the new folder, and the run that was refused


def test_a_file_system_without_locks_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", mock.Mock(side_effect=OSError(errno.ENOTSUP, "no locks")))
    corpus = tmp_path / ".out.grain_sft-work/corpus"
    produce = functools.partial(target.Target(tmp_path / "out").produce, {"key": "same"}, overwrite=False)
    assert produce(lambda: corpus.mkdir() or {}) == {} and (tmp_path / "out").is_dir()
