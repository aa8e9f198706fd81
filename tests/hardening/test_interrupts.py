"""Ctrl-C at any moment of a command: one line, status 130, and nothing left behind, neither processes nor half-made files."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from batches import sections
from children import ROOT, wait_until, write_corpus_and_tokenizer
from sft_files import EOS

MARK = "GRAIN_SFT_TEST_MARK"

PREPARE = ["--template", "primer", "--tokenizer", "{data}/spm.model"]
COMMANDS = {
    "demo": ["demo", "--dir", "{out}/demo", "--steps", "9"],
    "pack": ["pack", "{data}/olmo", "--sequence-length", "64", "--eos-token-id", str(EOS)],
    "prepare": ["prepare", "{data}/chats.jsonl", "-o", "{out}/prepared", "--workers", "2", *PREPARE],
    "train-tokenizer": ["train-tokenizer", "{data}/chats.jsonl", "-o", "{out}/m.model", "--vocab-size", "2000"],
    "report": ["report", "{data}/config.json", "--output", "{out}/report.html", "--seconds", "0.2"],
    "bench": ["bench", "{data}/config.json", "--seconds", "5", "--max-workers", "2"],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A corpus, conversations, a tokenizer and a config."""
    folder = tmp_path_factory.mktemp("data")
    write_corpus_and_tokenizer(folder)
    draw = random.Random(0)
    syllables = [a + b for a in "bcdfghklmnprst" for b in "aeiou"]
    with open(folder / "chats.jsonl", "w") as file:
        for _ in range(3000):
            text = " ".join("".join(draw.choices(syllables, k=draw.randrange(1, 5))) for _ in range(40))
            turns = [{"role": "user", "content": "word"}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")
    config = sections(folder / "olmo", 64, corpus={"eos_token_id": EOS}, global_batch_size=8)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def interrupt(name: str, data: Path, out: Path, delay: float) -> str | None:
    """Interrupt a command `delay` seconds after it began to handle signals; return what was wrong about its end, or None where
    it ended before. Its children get the signal too, as a terminal sends it."""
    mark, temporary = uuid.uuid4().hex, out / "tmp"
    temporary.mkdir(parents=True)
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "GRAIN_SFT_CACHE_DIR": str(out / "cache")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "grain_sft", *(word.format(data=data, out=out) for word in COMMANDS[name])]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)
    tasks = f"/proc/{process.pid}/task"
    assert wait_until(lambda: len(os.listdir(tasks)) > 1, 60)  # the thread of grain_sft.cli.interrupts
    time.sleep(delay)
    ended, sent = process.poll() is not None, time.monotonic()
    if not ended:
        os.killpg(process.pid, signal.SIGINT)
    try:
        _, text = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        _, text = process.communicate()
    seconds, status = time.monotonic() - sent, process.returncode
    if ended or (status == 0 and not text and seconds < 0.5):  # in the latter case the kernel was taking it down
        return None
    wait_until(lambda: not marked(mark), 2)
    files = [path for path in out.rglob("*") if path.is_file() and (path.suffix == ".tmp" or temporary in path.parents)]
    line, found = f"grain-sft {name}: interrupted.", text.splitlines()
    if status != 130 or found.count(line) != 1 or found[-1] != line:
        return f"status {status}, stderr: {text[-2000:]}"
    if any(word in text for word in ("Traceback", "Exception ignored", "leaked", "Segmentation")):
        return text[-2000:]
    return f"left behind: processes {marked(mark)}, files {files}" if files or marked(mark) else ""


def marked(mark: str) -> list[str]:
    """The command lines of the processes whose environment has `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_leaves_one_line_and_nothing_else(name, data, tmp_path):
    delay = random.Random(name).uniform(0, 1.5)
    for attempt in range(10):
        fault = interrupt(name, data, tmp_path / str(attempt), delay / 2**attempt)
        if fault is not None:  # else the command is quicker than that here
            break
    assert fault == "", (delay, fault)


def test_a_signal_to_a_forked_child_does_not_reach_its_parent():
    code = """
import os, signal, sys
from grain_sft.cli.interrupts import Guard

def command():
    child = os.fork()
    if not child:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

sys.exit(Guard("test").run(command))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
