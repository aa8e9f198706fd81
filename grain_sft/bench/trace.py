"""Trace: a run of OLMo-3 Think SFT's size, traced by fresh processes of the command line, each timed from start to end.

The corpus has as many documents and tokens as that run's, in parts of 1 GiB as open-instruct writes them; lengths are made
up (log-normal, at most a row), and tokens and label masks are holes of sparse files, which read as zeros from memory. So
it measures planning, orders and tracing, and not a disk.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.errors import PipelineError

DOCUMENTS, TOKENS = 2_268_468, 22_700_000_000  # of OLMo-3 7B Think SFT: its paper's table 17, and 45.4 B in 2 epochs
LENGTH, BATCH_TOKENS, SEED = 32_768, 1_048_576, 34_521
PART_TOKENS = 1 << 28  # 1 GiB of uint32
STEPS = (1000, 7000)

Ints = npt.NDArray[np.int64]


class Run(NamedTuple):
    """One process: seconds from start to end, and the most memory that it held, in GB (1e9 bytes)."""

    seconds: float
    gigabytes: float


def measure(folder: Path, documents: int) -> dict[str, Run]:
    """The processes in turn, on a corpus of so many documents: with an empty cache first, then with what that left."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        place = Path(temporary)
        config = make_corpus(place, made_up_lengths(documents))
        scale = documents / DOCUMENTS
        first, last = (max(1, int(step * scale)) for step in STEPS)
        steps = f"{first}:{max(last, first + 1)}"
        lines = str(place / "lines.csv")
        return {
            f"cold: plan, order, trace --steps {steps}": _run(
                place, ["trace", config, "--steps", steps, "--output", lines]
            ),
            f"warm: trace --steps {steps}": _run(place, ["trace", config, "--steps", steps, "--output", lines]),
            "warm: the same, --summary": _run(place, ["trace", config, "--steps", steps, "--summary"]),
            "warm: the same without counting loss": _run(
                place, ["trace", config, "--steps", steps, "--output", lines, "--no-trainable"]
            ),
            "warm: trace --document": _run(place, ["trace", config, "--document", str(documents // 2)]),
            "warm: trace --checkpoints": _run(place, ["trace", config, "--checkpoints"]),
            "warm: receipt": _run(place, ["receipt", config]),
        }


def report(figures: dict[str, Run]) -> dict[str, dict[str, float]]:
    """Print a table; returns it."""
    print(f"\n{'trace: processes, from start to end':54}{'s':>9}{'GB':>9}")
    for name, run in figures.items():
        print(f"{name:54}{run.seconds:9.2f}{run.gigabytes:9.2f}")
    return {name: run._asdict() for name, run in figures.items()}


def make_corpus(folder: Path, lengths: Ints) -> str:
    """A corpus of documents of these lengths in `folder`/data, and the config of its run; returns the path of the config."""
    data = folder / "data"
    data.mkdir()
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    for number, begin in enumerate(range(0, total, PART_TOKENS)):
        stop = min(begin + PART_TOKENS, total)
        for name, width in (("token_ids", 4), ("labels_mask", 1)):
            with open(data / f"{name}_part_{number:04d}.npy", "wb") as file:
                file.truncate((stop - begin) * width)
        first, last = np.searchsorted(ends, (begin, stop - 1), side="right")  # documents that have a token here
        borders = np.minimum(np.concatenate([[begin], ends[first : last + 1]]), stop) - begin
        lines = "".join(
            f"{start},{end}\n" for start, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True)
        )
        (data / f"token_ids_part_{number:04d}.csv.gz").write_bytes(gzip.compress(lines.encode(), 1, mtime=0))
    config = {
        "corpus": {"path": str(data), "format": "olmo", "dtype": "uint32", "eos_token_id": 100_257},
        "layout": {"kind": "packed", "sequence_length": LENGTH},
        "sampler": {"order": "olmo", "seed": SEED, "global_batch_tokens": BATCH_TOKENS, "epochs": 2},
        "transforms": ["shift_targets"],
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return str(path)


def made_up_lengths(documents: int) -> Ints:
    """Log-normal lengths, 1 to a row, whose mean is that of the run's documents."""
    normal = np.random.default_rng(0).standard_normal(documents)
    low, high = 1.0, float(LENGTH)
    lengths: Ints = np.ones(documents, np.int64)
    for _ in range(40):
        median = (low + high) / 2
        lengths = np.clip(np.exp(np.log(median) + normal), 1, LENGTH).astype(np.int64)
        if lengths.mean() < TOKENS / DOCUMENTS:
            low = median
        else:
            high = median
    return lengths


def _run(folder: Path, arguments: list[str]) -> Run:
    """Run the command line in a process of its own, with a cache of its own in `folder`."""
    command = [sys.executable, "-m", "grain_sft.cli.main", *arguments]
    environment = {**os.environ, "GRAIN_SFT_CACHE_DIR": str(folder / "cache")}
    with tempfile.TemporaryFile() as output:
        begin = time.perf_counter()
        redirect = [(os.POSIX_SPAWN_DUP2, output.fileno(), number) for number in (1, 2)]
        child = os.posix_spawn(sys.executable, command, environment, file_actions=redirect)
        _, status, usage = os.wait4(child, 0)
        seconds = time.perf_counter() - begin
        if status:
            output.seek(0)
            reason = output.read().decode(errors="replace").strip().rpartition("\n")[2]
            raise PipelineError(
                f"{' '.join(arguments)}: ended with status {os.waitstatus_to_exitcode(status)}: {reason}"
            )
    return Run(seconds, usage.ru_maxrss * 1024 / 1e9)
