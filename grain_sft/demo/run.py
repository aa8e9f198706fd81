"""The demo from end to end: a corpus, three runs, and whether the resumed one equals the uninterrupted one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grain_sft
from grain_sft.demo.child import Child, RunOptions
from grain_sft.demo.corpus import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Prepared, prepare_corpus
from grain_sft.demo.folder import DemoFolder, claim, newest_step, remove
from grain_sft.demo.records import Logs, Record, difference, table
from grain_sft.errors import GrainSftError

INTERRUPTED, RESUMED, UNINTERRUPTED = "interrupted", "resumed", "uninterrupted"

_LINES_EVERY = 10  # steps


class Plan(NamedTuple):
    """Steps of the whole training, and the seed of the order of rows and of the parameters."""

    steps: int
    seed: int

    @property
    def checkpoint_every(self) -> int:
        """Steps from one checkpoint to the next: a third of the training."""
        return self.steps // 3

    @property
    def killed_after(self) -> int:
        """The step after which the first run is killed: two thirds of the way to the second checkpoint."""
        return self.checkpoint_every + (self.checkpoint_every - 1) * 2 // 3


def run_demo(where: str | os.PathLike[str], *, steps: int, seed: int) -> int:
    """Carry out the demo in the folder `where`: return 0 if the runs are equal bit for bit, else 1.

    Raises:
      GrainSftError: The folder cannot be written to, or a run failed.
    """
    began = time.perf_counter()
    plan = Plan(steps, seed)
    with claim(where) as folder:
        remove(folder.runs)
        _describe(folder, prepare_corpus(folder, plan.seed, _say))
        logs, resumed_from = _train(folder, plan)
        equal = _compare(plan, resumed_from, logs)
        made = ", ".join(path.name for path in (folder.corpus, folder.config, folder.runs))
        _say(f"\nIn {folder.root}, after {time.perf_counter() - began:.0f} seconds: {made}")
        _say(f"Go on in Python: grain_sft.load({str(folder.config)!r}).iter(start_step={plan.steps})")
    return 0 if equal else 1


def _describe(folder: DemoFolder, prepared: Prepared) -> None:
    corpus = prepared.corpus
    found = grain_sft.load(folder.config, host=grain_sft.Host(0, 1)).source.layout.statistics
    share = found["padding"] / (found["tokens"] + found["padding"])
    packed = (
        f"{found['segments'] / found['rows']:.1f} conversations in a row, {share:.1%} padding, "
        f"{found['cut_documents']} cut to a row's length"
    )
    _say(f"chat    {prepared.summary}")
    _say(f"tokens  {corpus.num_tokens:,}, {corpus.dtype.name}, of a vocabulary of {VOCAB_SIZE}")
    _say(f"rows    {found['rows']:,} of {SEQUENCE_LENGTH} tokens: {packed}; a step reads {GLOBAL_BATCH_SIZE}")
    _say(f"corpus  {corpus.ends_fingerprint[:24]}, {'as an earlier demo left it' if prepared.reused else 'made now'}")


def _train(folder: DemoFolder, plan: Plan) -> tuple[Logs, int]:
    """Run the three runs, one after the other; return what each logged, and the step that the second began at."""

    def run(name: str, start: int, resume: Path | None = None, killed_after: int | None = None) -> list[Record]:
        path = folder.runs / name
        path.mkdir(parents=True)
        every, continued = plan.checkpoint_every, None if resume is None else str(resume)
        options = RunOptions(str(folder.config), str(path), VOCAB_SIZE, plan.steps, every, plan.seed, continued)
        found, killed = [], False
        with Child(name, options) as process:
            for record in _shown(process, plan, start):
                found.append(record)
                killed = killed or (killed_after is not None and record.step >= killed_after and process.kill())
            if not killed:
                process.finish()
        if killed:
            newest = newest_step(options.checkpoints)
            done = f"when {len(found)} steps were done; newest checkpoint: step {newest}"
            _say(f"  killed: SIGKILL to process {process.pid} {done}")
        elif killed_after is not None:
            raise GrainSftError(f"the {name} run ended before it could be killed: give more --steps.")
        return found

    _say(f"\n1 of 3, {INTERRUPTED}: from step 0, a checkpoint every {plan.checkpoint_every} steps")
    logs = {INTERRUPTED: run(INTERRUPTED, 0, killed_after=plan.killed_after)}
    checkpoints = folder.runs / INTERRUPTED / "checkpoints"
    newest = newest_step(checkpoints)
    _say(f"\n2 of 3, {RESUMED}: a new process, which gets that checkpoint and iter(start_step={newest})")
    logs[RESUMED] = run(RESUMED, newest, resume=checkpoints)
    _say(f"\n3 of 3, {UNINTERRUPTED}: another, which gets nothing and begins at step 0")
    logs[UNINTERRUPTED] = run(UNINTERRUPTED, 0)
    return logs, newest


def _shown(child: Child, plan: Plan, start: int) -> Iterator[Record]:
    """Yield the records of a run as they come, and print the first, every tenth and the last."""
    compiled = 0.0
    for record in child.records():
        step, now = record.step, time.perf_counter()
        compiled = compiled or now  # the first step compiles, and is left out of the speed
        speed = (step - start) * GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH / max(now - compiled, 1e-9)
        if step in (start, plan.steps - 1) or step % _LINES_EVERY == 0:
            rate = "compiled" if step == start else f"{speed:,.0f} tokens/s"
            _say(f"  step {step:4d}  loss {record.loss:.4f}  {rate}")
        yield record


def _compare(plan: Plan, resumed_from: int, logs: Logs) -> bool:
    """Print the losses of both halves of the killed training and of the other, and return whether they are equal."""
    end = len(logs[INTERRUPTED])
    shown = {0, *range(resumed_from - 1, resumed_from + 2), end - 1, end, (end + plan.steps) // 2}
    shown |= {plan.steps - 2, plan.steps - 1}
    _say("\nLoss in nats a token, and the same float exactly, in hexadecimal:")
    for line in table((INTERRUPTED, RESUMED, UNINTERRUPTED), sorted(shown & set(range(plan.steps))), logs):
        _say("  " + line)
    _say("")
    compared = {INTERRUPTED: range(end), RESUMED: range(resumed_from, plan.steps)}
    for name, steps in {UNINTERRUPTED: range(plan.steps), **compared}.items():  # the first has to be complete
        found = difference(name, UNINTERRUPTED, steps, logs)
        if found is not None:
            _say(f"NOT EQUAL. {found}")
            return False
    for name, steps in compared.items():
        which = f"all {len(steps)} steps from {steps[0]} to {steps[-1]}"
        _say(f"EQUAL: {name} and {UNINTERRUPTED}, {which}: losses bit for bit, batches by SHA-256.")
    return True


def _say(text: str) -> None:
    print(text, flush=True)
