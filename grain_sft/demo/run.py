"""The demo: make a corpus, train three times, and compare the resumed run with the uninterrupted one."""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import grain_sft
from grain_sft.child_environment import child_environment
from grain_sft.corpus import Corpus
from grain_sft.demo.corpus import CONFIG, GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, prepare_corpus
from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import exclusive, files, without_interrupts

INTERRUPTED, RESUMED, UNINTERRUPTED = "interrupted", "resumed", "uninterrupted"

_MARKER = ".grain_sft_demo"  # file that marks the folder of a demo; a running demo locks it
_PRINT_EVERY = 10  # steps
_say = functools.partial(print, flush=True)
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # no accelerator is needed, and another process may use it
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # some jaxlibs crash on cached code for CPUs
}


class Options(msgspec.Struct, frozen=True):
    """Options of a training process."""

    config: str  # path
    folder: str  # path of the run's log and checkpoints
    steps: int  # steps of the whole training; a checkpoint is written after each third
    seed: int  # seed of the initial parameters
    resume: str | None = None  # folder of the run whose newest checkpoint is loaded; None begins at step 0


class Record(msgspec.Struct, frozen=True):
    """One step of a run."""

    step: int  # from 0
    loss: float  # nats per token before the step's update; a float32, which JSON keeps exactly
    batch_sha256: str


Log = Mapping[int, Record]
"""Records of a run by step."""


def run_demo(where: str | os.PathLike[str], *, steps: int, seed: int) -> int:
    """Run the demo in the folder `where`. Return its exit status, 0 if the runs are equal bit for bit, else 1.

    Raises:
      GrainSftError: The folder cannot be written to, or a run failed.
    """
    began = time.perf_counter()
    with claim(where) as root:
        folders = {name: str(root / "runs" / name) for name in (INTERRUPTED, RESUMED, UNINTERRUPTED)}
        shutil.rmtree(root / "runs", ignore_errors=True)
        _describe(root, *prepare_corpus(root, seed))
        options = Options(str(root / CONFIG), folders[INTERRUPTED], steps, seed)
        _say(f"\n1 of 3, {INTERRUPTED}: from step 0, a checkpoint every {steps // 3} steps")
        logs = {INTERRUPTED: train(INTERRUPTED, options, kill_after=killed_after(steps))}
        start = newest_step(folders[INTERRUPTED])
        _say(f"\n2 of 3, {RESUMED}: a new process, which gets that checkpoint and iter(start_step={start})")
        resumed = msgspec.structs.replace(options, folder=folders[RESUMED], resume=folders[INTERRUPTED])
        logs[RESUMED] = train(RESUMED, resumed)
        _say(f"\n3 of 3, {UNINTERRUPTED}: a new process without a checkpoint, which begins at step 0")
        logs[UNINTERRUPTED] = train(UNINTERRUPTED, msgspec.structs.replace(options, folder=folders[UNINTERRUPTED]))
        equal = _compare(steps, start, logs)
        _say(f"\nIn {root}, after {time.perf_counter() - began:.0f} seconds: corpus, {CONFIG}, runs")
        _say(f"Continue in Python: grain_sft.load({str(root / CONFIG)!r}).iter(start_step={steps})")
    return 0 if equal else 1


def killed_after(steps: int) -> int:
    """Return the step after which the first run is killed: two thirds of the way from the first checkpoint to the second.

    So the resumed run, which begins at the checkpoint, repeats steps of the killed run.
    """
    first_checkpoint = steps // 3
    return first_checkpoint + (first_checkpoint - 1) * 2 // 3


@contextlib.contextmanager
def claim(where: str | os.PathLike[str]) -> Iterator[Path]:
    """Make and lock the folder `where`, or lock the folder of an earlier demo. Yield the absolute path of the folder."""
    if files.is_remote(os.fspath(where)):
        raise StorageError(f"{where}: not a local folder. The demo trains on this machine: give one with --dir.")
    root = Path(os.path.abspath(files.normalize(where)))
    files.check_writable(str(root), folder=True)
    root.mkdir(parents=True, exist_ok=True)
    marker = root / _MARKER
    if not marker.exists():
        # a demo that was killed may have left a temporary file of the marker, `..grain_sft_demo…`
        others = sorted(entry.name for entry in root.iterdir() if not entry.name.startswith(f".{_MARKER}"))
        if others:
            raise GrainSftError(f"{root}: contains {others[0]!r}, but no earlier demo. Give a new folder with --dir.")
        files.write_bytes(str(marker), b"A folder of `grain-sft demo`, which replaces its content in each run.\n")
    in_use = f"{root}: another demo is running in this folder. Wait for it, or give another folder with --dir."
    with exclusive(os.open(marker, os.O_RDONLY | os.O_CLOEXEC), in_use):
        yield root


def newest_step(checkpoints: str | os.PathLike[str]) -> int:
    """Return the step of the newest checkpoint in a folder."""
    steps = [int(path.stem.removeprefix("step-")) for path in Path(checkpoints).glob("step-*.npz")]
    if not steps:
        raise GrainSftError(f"{checkpoints}: contains no checkpoint. Give more --steps.")
    return max(steps)


def _describe(root: Path, corpus: Corpus, manifest: Mapping[str, Any]) -> None:
    """Print figures of the corpus and of its packed rows."""
    counts = manifest["splits"]["train"]
    layout = grain_sft.load(root / CONFIG, host=grain_sft.Host(0, 1)).source.layout.statistics
    padding = layout["padding"] / (layout["tokens"] + layout["padding"])
    packed = f"{layout['segments'] / layout['rows']:.1f} conversations in a row, {padding:.1%} padding"
    cut = f"{layout['cut_documents']} cut to a row's length"
    share = counts["trainable_tokens"] / counts["tokens"]
    _say(f"chat    {counts['documents']:,} questions, answered by docstrings; {share:.0%} of the tokens are answers")
    _say(f"tokens  {corpus.num_tokens:,}, {corpus.dtype.name}, of a vocabulary of {VOCAB_SIZE}")
    _say(f"rows    {layout['rows']:,} of {SEQUENCE_LENGTH} tokens: {packed}, {cut}; a step reads {GLOBAL_BATCH_SIZE}")
    _say(f"corpus  {corpus.ends_fingerprint[:24]}")


def train(name: str, options: Options, kill_after: int | None = None) -> Log:
    """Train in another process, and return the records of its steps.

    With `kill_after`, the process is killed after this step.

    Raises:
      GrainSftError: The process failed, or reached the last step before it was killed.
    """
    path = Path(options.folder, "log.jsonl")
    path.parent.mkdir(parents=True)
    records: dict[int, Record] = {}
    last_line = "it printed nothing."  # last line that is not a record; a process that fails ends with the reason
    with started(options) as process, open(path, "w", buffering=1, encoding="utf-8") as log:
        for line in process.stdout or ():
            if (record := parse(line)) is None:
                last_line = line.strip() or last_line
                continue
            records[record.step] = record
            log.write(line)
            if len(records) == 1 or record.step == options.steps - 1 or record.step % _PRINT_EVERY == 0:
                _say(f"  step {record.step:4d}  loss {record.loss:.4f}")
            if kill_after is not None and record.step >= kill_after:
                process.kill()  # until SIGKILL arrives, the process may print more steps
        status = process.wait()
    was_killed = status == -signal.SIGKILL
    last_step = max(records, default=-1)
    if kill_after is not None:
        # the training had ended before SIGKILL arrived
        if status == 0 or (was_killed and last_step == options.steps - 1):
            raise GrainSftError(f"the {name} run ended before it could be killed: give more --steps.")
        if was_killed and last_step >= kill_after:
            killed = f"SIGKILL to process {process.pid} after {len(records)} steps"
            _say(f"  killed: {killed}; newest checkpoint: step {newest_step(options.folder)}")
            return records
    if was_killed:  # by the system
        last_line = "most likely the machine ran out of memory. Free 1 GB, which a run takes."
    if status:
        end = f"exit status {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        raise GrainSftError(f"the {name} run ended with {end}: {last_line}")
    return records


@contextlib.contextmanager
def started(options: Options) -> Iterator[subprocess.Popen[str]]:
    """Start a training process that prints its records, and kill it at the end."""
    with without_interrupts():  # only this process handles Ctrl-C, and kills the other process
        process = subprocess.Popen(
            # with -P, Python imports no module of the current folder
            [sys.executable, "-P", "-m", "grain_sft.demo.train", msgspec.json.encode(options).decode()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=child_environment() | _ENVIRONMENT,
            encoding="utf-8",
            errors="replace",
        )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def parse(line: str) -> Record | None:
    """Return the record in a line; None for another line, such as an error."""
    try:
        return msgspec.json.decode(line, type=Record)
    except msgspec.DecodeError:
        return None


def difference(steps: range, run: Log, other: Log) -> str | None:
    """Return a sentence about the first of `steps` whose records differ; None if all are equal."""
    for step in steps:
        if step not in run or run[step] != other.get(step):
            return f"Step {step} is the first that differs: {run.get(step)} and {other.get(step)}."
    return None


def table(steps: Sequence[int], logs: Mapping[str, Log]) -> list[str]:
    """Return a header and a line for each step, with the losses of all runs as decimal and hexadecimal floats."""
    lines = [f"step  {'  '.join(f'{name:<21}' for name in logs)}".rstrip()]
    for step in steps:
        records = [log.get(step) for log in logs.values()]
        # `re.sub` removes the zeros at the end of a mantissa
        cells = [f"{each.loss:.4f} {re.sub('0*p', 'p', each.loss.hex())}" if each else "-" for each in records]
        verdict = "same" if len({*records} - {None}) == 1 else "DIFFERS"
        lines.append(f"{step:4d}  {'  '.join(f'{cell:<21}' for cell in cells)}  {verdict}")
    return lines


def _compare(steps: int, resumed_from: int, logs: Mapping[str, Log]) -> bool:
    """Print the losses of the runs, and return whether their records are equal."""
    end = len(logs[INTERRUPTED])  # number of steps before the kill
    at_resumption = range(resumed_from - 1, resumed_from + 2)
    shown = {0, *at_resumption, end - 1, end, (end + steps) // 2, steps - 2, steps - 1}
    lines = table(sorted(shown & set(range(steps))), logs)
    _say("\nLoss in nats a token, and the same float exactly, in hexadecimal:", *lines, sep="\n  ", end="\n\n")
    for name, compared in {INTERRUPTED: range(end), RESUMED: range(resumed_from, steps)}.items():
        if first_difference := difference(compared, logs[name], logs[UNINTERRUPTED]):
            _say(f"NOT EQUAL, {name} and {UNINTERRUPTED}. {first_difference}")
            return False
        all_steps = f"all {len(compared)} steps from {compared[0]} to {compared[-1]}"
        _say(f"EQUAL: {name} and {UNINTERRUPTED}, {all_steps}: losses bit for bit, batches by SHA-256.")
    return True
