"""The demo from end to end: a corpus, three runs, and whether the resumed one is the uninterrupted one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grain_sft
from grain_sft.demo import checkpoint, log
from grain_sft.demo.child import Child
from grain_sft.demo.compare import Comparison, compare, table
from grain_sft.demo.data import GLOBAL_BATCH_SIZE, SEQUENCE_LENGTH, VOCAB_SIZE, Data
from grain_sft.demo.folder import DemoFolder, claim, remove, writing
from grain_sft.demo.log import Record
from grain_sft.demo.prepare import Prepared, prepare
from grain_sft.demo.progress import Records, display
from grain_sft.demo.train import RunOptions
from grain_sft.errors import GrainSftError

MIN_STEPS = 9

INTERRUPTED, RESUMED, UNINTERRUPTED = "interrupted", "resumed", "uninterrupted"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens, and when.

    Attributes:
      data: trained on.
      steps: of the whole training.
      seed: of the order of rows and of the parameters.
    """

    data: Data
    steps: int
    seed: int

    @property
    def checkpoint_every(self) -> int:
        """Steps from one checkpoint to the next: a third of the training."""
        return self.steps // 3

    @property
    def killed_after(self) -> int:
        """The step whose report makes the parent kill the first run: two thirds of the way to the second checkpoint."""
        return self.checkpoint_every + (self.checkpoint_every - 1) * 2 // 3


def run(where: str | os.PathLike[str], plan: Plan) -> int:
    """The demo in the folder `where`: 0 if the runs are equal bit for bit, else 1.

    Raises:
      GrainSftError: it can't be carried out: a folder that can't be written to, a run that failed.
    """
    began = time.perf_counter()
    with claim(where) as folder:
        remove(folder.runs)
        prepared = prepare(folder, plan.data, plan.seed, _say)
        _describe(folder, plan.data, prepared)
        logs, resumed_from = _train(folder, plan)
        comparisons = _compare(plan, resumed_from, logs)
        _report(plan, logs, comparisons)
        made = (folder.corpus, folder.config, folder.runs)
        seconds = time.perf_counter() - began
        _say(f"\nIn {folder.root}, after {seconds:.0f} seconds: {', '.join(path.name for path in made)}")
        _say(f"Go on in Python: grain_sft.load({str(folder.config)!r}).iter(start_step={plan.steps})")
    return 0 if all(comparison.equal for comparison in comparisons) else 1


def _train(folder: DemoFolder, plan: Plan) -> tuple[dict[str, list[Record]], int]:
    """The three runs, one after the other: what each logged, and the step that the second began at."""

    def options(name: str, resume: Path | None = None) -> RunOptions:
        run_folder = folder.runs / name
        with writing(run_folder):
            run_folder.mkdir(parents=True)
        return RunOptions(
            config=folder.config,
            folder=run_folder,
            vocab_size=VOCAB_SIZE,
            steps=plan.steps,
            checkpoint_every=plan.checkpoint_every,
            seed=plan.seed,
            resume=resume,
        )

    first = options(INTERRUPTED)
    _say(f"\n1 of 3, {INTERRUPTED}: from step 0, a checkpoint every {plan.checkpoint_every} steps")
    _train_and_kill(first, plan)
    resumed_from = _newest(first)
    _say(f"\n2 of 3, {RESUMED}: a new process, which gets that checkpoint and iter(start_step={resumed_from})")
    second = options(RESUMED, resume=first.checkpoints)
    _train_to_the_end(RESUMED, second, plan, resumed_from)
    _say(f"\n3 of 3, {UNINTERRUPTED}: another, which gets nothing and begins at step 0")
    third = options(UNINTERRUPTED)
    _train_to_the_end(UNINTERRUPTED, third, plan, 0)
    runs = {INTERRUPTED: first, RESUMED: second, UNINTERRUPTED: third}
    return {name: log.read(each.log) for name, each in runs.items()}, resumed_from


def _train_and_kill(options: RunOptions, plan: Plan) -> None:
    with Child(INTERRUPTED, options) as child:
        with contextlib.closing(_shown(child, plan, 0)) as records:
            killed = any(record.step >= plan.killed_after for record in records) and child.kill()
        if not killed:
            child.finish()
            raise GrainSftError(f"the {INTERRUPTED} run ended before it could be killed: give more --steps.")
        done = len(log.read(options.log))
        newest = _newest(options)
        _say(f"  killed: SIGKILL to process {child.pid} when {done} steps were done; newest checkpoint: step {newest}")


def _train_to_the_end(name: str, options: RunOptions, plan: Plan, start: int) -> None:
    with Child(name, options) as child:
        with contextlib.closing(_shown(child, plan, start)) as records:
            for _ in records:
                pass
        child.finish()


def _shown(child: Child, plan: Plan, start: int) -> Records:
    """The records of a run from step `start` on, displayed as they come."""
    return display()(child.records(), start, plan.steps, GLOBAL_BATCH_SIZE * SEQUENCE_LENGTH)


def _newest(options: RunOptions) -> int:
    """The step of a run's newest checkpoint."""
    found = checkpoint.steps(options.checkpoints)
    if not found:
        raise GrainSftError(f"{options.checkpoints}: the run left no checkpoint.")
    return found[-1]


def _compare(plan: Plan, resumed_from: int, logs: Mapping[str, Sequence[Record]]) -> list[Comparison]:
    """Both parts of the training that was killed, with the one that was not."""
    return [
        compare(UNINTERRUPTED, UNINTERRUPTED, range(plan.steps), logs),  # it is complete
        compare(INTERRUPTED, UNINTERRUPTED, range(len(logs[INTERRUPTED])), logs),
        compare(RESUMED, UNINTERRUPTED, range(resumed_from, plan.steps), logs),
    ]


def _describe(folder: DemoFolder, data: Data, prepared: Prepared) -> None:
    corpus = prepared.corpus
    layout = grain_sft.load(folder.config, host=grain_sft.Host(0, 1)).source.layout
    _say(f"{data.name}    {prepared.said}")
    _say(f"tokens  {corpus.num_tokens:,}, {corpus.dtype.name}, of a vocabulary of {VOCAB_SIZE}")
    rows = f"{len(layout):,} of {SEQUENCE_LENGTH} tokens"
    _say(f"rows    {rows}: {data.describe(layout)}; a step reads {GLOBAL_BATCH_SIZE}")
    _say(f"corpus  {corpus.ends_fingerprint[:24]}, {'as an earlier demo left it' if prepared.reused else 'made now'}")


def _report(plan: Plan, logs: Mapping[str, Sequence[Record]], comparisons: Sequence[Comparison]) -> None:
    start = comparisons[-1].steps.start
    end = comparisons[1].steps.stop
    shown = {0, start - 1, start, start + 1, end - 1, end, (end + plan.steps) // 2, plan.steps - 2, plan.steps - 1}
    _say("\nLoss in nats a token, and the same float exactly, in hexadecimal:")
    for line in table(
        (INTERRUPTED, RESUMED, UNINTERRUPTED), sorted(step for step in shown if 0 <= step < plan.steps), logs
    ):
        _say("  " + line)
    _say("")
    for comparison in comparisons:
        if comparison.difference:
            _say(f"NOT EQUAL. {comparison.difference}")
            return
    for comparison in comparisons[1:]:
        first, last = comparison.steps[0], comparison.steps[-1]
        _say(
            f"EQUAL: {comparison.name} and {comparison.reference_name}, all {len(comparison.steps)} steps from {first} "
            f"to {last}: losses bit for bit, batches by SHA-256."
        )


def _say(text: str) -> None:
    print(text, flush=True)
