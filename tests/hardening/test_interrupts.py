"""Ctrl-C at any moment ends a command with one line and status 130, and leaves no process and no half-written file.

This command interrupts each command of the package `GRAIN_SFT_INTERRUPTS` times, by default 40, while four other processes
keep the machine busy. It prints figures.

    pytest -n0 -m heavy -s tests/hardening/test_interrupts.py
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from batches import sections
from children import ROOT, wait_until, write_corpus_and_tokenizer
from sft_files import EOS

COUNT = int(os.environ.get("GRAIN_SFT_INTERRUPTS", "40"))
LIMIT = 2.0  # seconds that a command may take to end after a signal
MARK = "GRAIN_SFT_TEST_MARK"  # variable of the environment by which a command's processes are found

PREPARE = ["--template", "primer", "--tokenizer", "{data}/spm.model"]
COMMANDS = {
    "demo": (["demo", "--dir", "{out}/demo", "--steps", "9"], 20.0),
    "pack": (["pack", "{data}/olmo", "--sequence-length", "64", "--eos-token-id", str(EOS)], 5.0),
    "prepare": (["prepare", "{data}/chats.jsonl", "-o", "{out}/prepared", "--workers", "2", *PREPARE], 6.0),
    "train-tokenizer": (["train-tokenizer", "{data}/chats.jsonl", "-o", "{out}/m.model", "--vocab-size", "2000"], 4.0),
    "report": (["report", "{data}/config.json", "--output", "{out}/report.html", "--seconds", "0.2"], 8.0),
    "bench": (["bench", "{data}/config.json", "--seconds", "5", "--max-workers", "2"], 12.0),
}
"""The arguments of each command, and the longest time in seconds until a signal is sent."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
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


class Interrupted(NamedTuple):
    """How an interrupted command ended: the seconds from the signal to its end, and what was wrong ("" if nothing)."""

    seconds: float
    fault: str


def interrupt(name: str, data: Path, out: Path, delay: float, whole_group: bool) -> Interrupted | None:
    """Interrupt a command `delay` seconds after it began to handle signals, and its children too if `whole_group`.

    Return None if the command ended before the signal.
    """
    mark, temporary = uuid.uuid4().hex, out / "tmp"
    temporary.mkdir(parents=True)
    environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "GRAIN_SFT_CACHE_DIR": str(out / "cache")}
    environment["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "grain_sft", *(word.format(data=data, out=out) for word in COMMANDS[name][0])]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore SIGINT
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)
    tasks = f"/proc/{process.pid}/task"
    assert wait_until(lambda: len(os.listdir(tasks)) > 1, 60)  # the thread of grain_sft.cli.interrupts
    time.sleep(delay)
    ended, sent = process.poll() is not None, time.monotonic()
    if not ended:
        (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
    try:
        _, text = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        _, text = process.communicate()
    seconds, status = time.monotonic() - sent, process.returncode
    if ended or (status == 0 and not text and seconds < 0.5):  # it was exiting when the signal came
        return None
    wait_until(lambda: not marked(mark), 2)
    files = [path for path in out.rglob("*") if path.is_file() and (path.suffix == ".tmp" or temporary in path.parents)]
    line, found = f"grain-sft {name}: interrupted.", text.splitlines()
    if status != 130 or found.count(line) != 1 or found[-1] != line:
        return Interrupted(seconds, f"status {status}, stderr: {text[-2000:]}")
    if any(word in text for word in ("Traceback", "Exception ignored", "leaked", "Segmentation")):
        return Interrupted(seconds, text[-2000:])
    left = f"left behind: processes {marked(mark)}, files {files}"
    return Interrupted(seconds, left if files or marked(mark) else "")


def marked(mark: str) -> list[str]:
    """Return the command lines of the processes whose environment has `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_prints_one_line_and_leaves_no_process_and_no_file(name, data, tmp_path):
    delay = random.Random(name).uniform(0, 1.5)
    for attempt in range(10):
        ended = interrupt(name, data, tmp_path / str(attempt), delay / 2**attempt, whole_group=True)
        if ended is not None:  # else the command ended before the signal: halve the delay
            break
    assert ended is not None and not ended.fault, (delay, ended)


FORK = """
    child = os.fork()
    if not child:
        os._exit(signal.set_wakeup_fd(-1) != -1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
"""
NATIVE_CODE = """
    atexit.register(time.sleep, 0.8)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # so that the signal does not end the sleep
    os.kill(os.getpid(), signal.SIGINT)
    ctypes.CDLL(None).usleep(700_000)
    print("went on")
"""


@pytest.mark.parametrize(("body", "status"), [(FORK, 0), (NATIVE_CODE, 130)], ids=["child", "native code"])
def test_a_signal_does_not_reach_a_parent_and_ends_a_command_in_native_code(body, status):
    begin = "import atexit, ctypes, os, signal, sys, time\nfrom grain_sft.cli.interrupts import Guard\ndef command():"
    code = [sys.executable, "-c", f"{begin}{body}\nsys.exit(Guard('test').run(command))"]
    ended = subprocess.run(code, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE)
    assert (ended.returncode, ended.stdout) == (status, b"")


@pytest.mark.heavy
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_can_be_interrupted_at_any_moment(name, data, tmp_path):
    draw = random.Random(name)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    faults, slowest, number, latest = [], 0.0, 0, COMMANDS[name][1]
    try:
        while number < COUNT:
            delay, group = draw.uniform(0, latest), draw.random() < 0.5
            ended = interrupt(name, data, tmp_path / f"{number}-{latest}", delay, group)
            if ended is None:
                latest *= 0.9  # the command ended before the signal
                continue
            number += 1
            slowest = max(slowest, ended.seconds)
            if ended.fault or ended.seconds > LIMIT:
                faults.append((delay, group, ended))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"\n{name}: {number} interrupts within {latest:.1f} s, {len(faults)} faults, slowest exit {slowest:.2f} s")
    assert not faults
