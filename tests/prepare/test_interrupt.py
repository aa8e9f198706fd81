"""A run that was killed, at any moment, and started again gives the bytes of one that was not."""

import gzip
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prepared import write_chats
from record_files import KINDS

KILLS = int(os.environ.get("GRAIN_SFT_KILLS", "4"))
"""Of each case; `GRAIN_SFT_KILLS=50 pytest tests/prepare/test_interrupt.py` takes some minutes."""

_PROGRAM = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from grain_sft.prepare import CHAT_TOKENS, Dataset, Request, prepare, train_tokenizer
from grain_sft.storage import locks
from grain_sft.prepare.records import inputs
from prepared import digests

inputs.GROUP_BYTES = 1  # a chunk for each unit
folder, format, workers, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
model = folder / "spm.model"
if not model.exists():
    words = [f"word {number} of the question, and the answer" for number in range(300)]
    special = (*CHAT_TOKENS, "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>")
    model.write_bytes(train_tokenizer(words, 350, special))
options = {"template": "primer", "max_length": 60} | json.loads(sys.argv[5])
[a], [b] = (map(str, folder.glob(pattern)) for pattern in ("a.*", "b.*"))
request = Request(
    (Dataset((a,), "2.5"), Dataset((b,), "0.5")), tokenizer=str(model), format=format,
    val_frac=0.1, part_bytes=20_000, shard_tokens=15_000, on_error="skip", **options,
)

def run(out):
    locks._cleaned.clear()  # as in a new process
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
    left = [path.name for path in folder.iterdir() if path.name.startswith(f".{out.name}.")]
    if workers == 1:
        assert not left, left
    shutil.rmtree(out)
print(f"{kills} killed, {unfinished} of them before the end, {longest:.2f} s")
"""


def write(path: Path, count: int) -> None:
    """Write lines; an array where the name ends in .json; compressed where it ends in .gz."""
    lines = write_chats(path, count, bad=tuple(range(6, count, 97))).read_text().splitlines()
    text = "[" + ",\n".join(lines) + "]" if path.suffix == ".json" else "".join(f"{line}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())


@pytest.mark.parametrize(
    ("format", "workers", "names"),
    [
        ("olmo", 2, ("a.jsonl", "b.jsonl")),
        ("openchat", 1, ("a.jsonl.gz", "b.json")),
        *(
            pytest.param(format, 1, ("a.jsonl", "b.jsonl"), marks=pytest.mark.heavy)
            for format in ("olmo", "episodes", "primer")
        ),
    ],
)
def test_killed_and_started_again(tmp_path: Path, format: str, workers: int, names: tuple[str, str]) -> None:
    if format == "openchat":
        pytest.importorskip("pyarrow")
    for name, count in zip(names, (1500, 600), strict=True):
        write(tmp_path / name, count)
    run(tmp_path, format, workers, KILLS if workers == 1 else 2, {})


def write_texts(path: Path, count: int) -> None:
    """Write texts in the kind of file, or the folder of them, that the name is of."""
    draw = random.Random(path.name)
    texts = ["".join(draw.choices("the answer \n\té漢😀", k=draw.randrange(200))) for _ in range(count)]
    if path.suffix == ".folder":
        path.mkdir()
        for number, text in enumerate(texts):
            (path / f"{number}.txt").write_text(text)
    else:
        path.write_bytes(KINDS[path.name.partition(".")[2]]([{"text": text} for text in texts]))


@pytest.mark.parametrize(
    ("format", "names", "kills"),
    [
        ("olmo", ("a.jsonl", "b.array_record"), 3),
        ("megatron", ("a.arrow", "b.jsonl"), 2),
        *(
            pytest.param(format, names, 25, marks=pytest.mark.heavy)
            for format in ("olmo", "megatron")
            for names in (("a.jsonl.gz", "b.arrow"), ("a.array_record", "b.folder"))
        ),
    ],
)
def test_texts_killed_and_started_again(tmp_path: Path, format: str, names: tuple[str, str], kills: int) -> None:
    for name, count in zip(names, (40 * kills, 10 * kills), strict=True):
        write_texts(tmp_path / name, count)
    run(tmp_path, format, 1, kills, {"template": "text", "fim_rate": 0.5, "empty": "keep", "max_length": 150})


def run(folder: Path, format: str, workers: int, kills: int, options: dict[str, Any]) -> None:
    arguments = [str(folder), format, str(workers), str(kills), json.dumps(options)]
    command = [sys.executable, "-c", _PROGRAM, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    print(result.stdout)
