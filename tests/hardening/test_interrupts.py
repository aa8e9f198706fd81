"""Ctrl-C at any moment of a command: one line, status 130, and nothing left behind, neither processes nor half-written files.

    pytest -n0 -m heavy -s tests/hardening/test_interrupts.py

interrupts each command `GRAIN_SFT_INTERRUPTS` times (40) while four other processes keep the machine busy, and prints figures.
"""

from __future__ import annotations

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
from children import ROOT, wait_until, write_corpus_and_tokenizer
from sft_files import EOS

COUNT = int(os.environ.get("GRAIN_SFT_INTERRUPTS", "40"))
LIMIT = 2.0  # seconds
MARK = "GRAIN_SFT_TEST_MARK"

PREPARE = ["--template", "primer", "--tokenizer", "{data}/spm.model"]
COMMANDS = {
    "demo": (["demo", "--dir", "{out}/demo", "--steps", "9"], 20.0),
    "pack": (["pack", "{data}/olmo", "--sequence-length", "64", "--eos-token-id", str(EOS)], 5.0),
    "prepare": (["prepare", "{data}/chats.jsonl", "-o", "{out}/prepared", "--workers", "2", *PREPARE], 6.0),
    "train-tokenizer": (
        ["train-tokenizer", "{data}/chats.jsonl", "-o", "{out}/made.model", "--vocab-size", "2000"],
        4.0,
    ),
    "report": (["report", "{data}/config.json", "--output", "{out}/report.html", "--seconds", "0.2"], 8.0),
    "bench": (["bench", "{data}/config.json", "--seconds", "5", "--max-workers", "2"], 12.0),
}
"""Arguments, and seconds within which a signal is sent."""


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
    config = {
        "corpus": {"path": str(folder / "olmo"), "eos_token_id": EOS},
        "layout": {"kind": "packed", "sequence_length": 64},
        "sampler": {"seed": 0, "global_batch_size": 8},
        "transforms": ["shift_targets"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Interrupted:
    """A command that is interrupted `delay` seconds after it began to handle signals; `whole_group` sends the signal to its
    children too, as a terminal does."""

    def __init__(self, name: str, data: Path, out: Path, delay: float, whole_group: bool) -> None:
        arguments, _ = COMMANDS[name]
        mark = uuid.uuid4().hex
        temporary = out / "tmp"
        temporary.mkdir(parents=True)
        environment = {**os.environ, MARK: mark, "TMPDIR": str(temporary), "GRAIN_SFT_CACHE_DIR": str(out / "cache")}
        environment["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-m", "grain_sft", *(word.format(data=data, out=out) for word in arguments)]
        streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            process = subprocess.Popen(command, env=environment, start_new_session=True, **streams)
        finally:
            signal.signal(signal.SIGINT, before)
        tasks = f"/proc/{process.pid}/task"
        assert wait_until(lambda: len(os.listdir(tasks)) > 1, 60)  # the thread of grain_sft.cli.interrupts
        time.sleep(delay)
        self.ended_before = process.poll() is not None
        sent = time.monotonic()
        if not self.ended_before:
            (os.killpg if whole_group else os.kill)(process.pid, signal.SIGINT)
        try:
            _, self.stderr = process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            _, self.stderr = process.communicate()
        self.seconds = time.monotonic() - sent
        self.status = process.returncode
        if self.status == 0 and not self.stderr and self.seconds < 0.5:  # the kernel was taking it down
            self.ended_before = True
        wait_until(lambda: not marked(mark), 2)
        self.processes = marked(mark)
        self.files = [str(path.relative_to(out)) for path in out.rglob("*") if is_half_written(path, temporary)]

    def fault(self, name: str) -> str:
        """What is wrong with how it ended."""
        line = f"grain-sft {name}: interrupted."
        found = self.stderr.splitlines()
        if self.status != 130 or found.count(line) != 1 or found[-1] != line:
            return f"status {self.status}, stderr: {self.stderr[-2000:]}"
        if any(word in self.stderr for word in ("Traceback", "Exception ignored", "leaked", "Segmentation")):
            return self.stderr[-2000:]
        if self.processes or self.files:
            return f"left behind: processes {self.processes}, files {self.files}"
        return ""


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


def is_half_written(path: Path, temporary: Path) -> bool:
    return path.is_file() and (path.name.endswith(".tmp") or temporary in path.parents)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_interrupted_command_leaves_one_line_and_nothing_else(name, data, tmp_path):
    delay = random.Random(name).uniform(0, 1.5)
    ended = Interrupted(name, data, tmp_path / "0", delay, whole_group=True)
    for attempt in range(1, 10):
        if ended.ended_before:  # the command is quicker than that here
            delay /= 2
            ended = Interrupted(name, data, tmp_path / str(attempt), delay, whole_group=True)
    assert not ended.ended_before and not ended.fault(name), (delay, ended.fault(name))


@pytest.mark.heavy
@pytest.mark.parametrize("name", COMMANDS)
def test_every_moment_of_a_command(name, data, tmp_path):
    """While the machine is busy."""
    draw = random.Random(name)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    faults, slowest, number, late = [], 0.0, 0, COMMANDS[name][1]
    try:
        while number < COUNT:
            delay, group = draw.uniform(0, late), draw.random() < 0.5
            ended = Interrupted(name, data, tmp_path / f"{number}-{late}", delay, group)
            if ended.ended_before:
                late *= 0.9
                continue
            number += 1
            slowest = max(slowest, ended.seconds)
            if ended.fault(name) or ended.seconds > LIMIT:
                faults.append((delay, group, ended.seconds, ended.fault(name)))
    finally:
        for process in busy:
            process.kill()
            process.wait()
    print(f"\n{name}: {number} interrupts within {late:.1f} s, {len(faults)} faults, slowest exit {slowest:.2f} s")
    assert not faults
