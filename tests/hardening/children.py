"""Helpers of the tests in this folder: files in which each token is its own number, and child processes with a time limit."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from sft_files import documents, write_olmo

ROOT = Path(__file__).parents[2]
LENGTH = 50
BATCH = 4

PROGRAM = """
import os, sys, time
import numpy as np
sys.modules["jax"] = None  # otherwise Grain imports JAX, which takes two thirds of the start-up time
import grain
del sys.modules["jax"]
from grain_sft import IndexSampler, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus

def make(folder, **options):
    corpus = open_corpus(folder, dtype="uint32")
    source = NpyDataSource(WindowLayout(corpus, 50), **options)
    return Pipeline(source, IndexSampler(len(source), global_batch_size=4, seed=3), [ShiftTargets()])
"""
"""The beginning of a child's program: `make(folder)` is a pipeline over the files of `write_counted`."""


def write_counted(folder: Path, files: int, rows: int) -> None:
    """Write `files` files of `rows` rows of LENGTH tokens. Token k of all files is k, so that each wrong row is noticed."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.arange(files * rows * LENGTH, dtype=np.uint32).reshape(files, -1)
    for number, part in enumerate(tokens):
        part.tofile(folder / f"{number:05d}.npy")


def write_corpus_and_tokenizer(folder: Path) -> None:
    """Write an OLMo corpus to `folder`/olmo, and a tokenizer for chats to `folder`/spm.model."""
    from prepared import save_trained

    write_olmo(folder / "olmo", documents(3000), part_tokens=20_000)
    save_trained(folder)


def is_right(batch, rows) -> bool:
    """Return whether a batch of `make`'s pipeline holds `rows`."""
    return np.array_equal(batch["inputs"], np.asarray(rows)[:, None] * LENGTH + np.arange(LENGTH))


def start(program: str | Path, *arguments: object, **options) -> subprocess.Popen[str]:
    """Start a child that runs the file `program`, or PROGRAM followed by the text `program`."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "helpers")))
    environment = {**os.environ, "PYTHONPATH": paths, **options.pop("env", {})}
    code = [str(program)] if isinstance(program, Path) else ["-c", PROGRAM + program]
    command, pipe = [sys.executable, *code, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe, env=environment, **options)


def run(program: str | Path, *arguments: object, timeout: float = 400, **options) -> str:
    """Start a child, wait for its end, and return what it printed. Its status must be 0."""
    child = start(program, *arguments, **options)
    try:
        out, err = child.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        child.kill()
        out, err = child.communicate()
        raise AssertionError(f"hangs: {out[-2000:]} {err[-2000:]}") from None
    assert child.returncode == 0, err[-4000:]
    return out


def wait_until(condition, seconds: float = 300) -> bool:
    """Wait until `condition()` holds, but at most `seconds`, and return whether it holds. A slow machine needs far less."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())
