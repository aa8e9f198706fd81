"""Speed of a config's pipeline on this machine, and the best numbers of threads and processes.

The stages of a step are measured on data in memory: a few steps are read again and again. `Pipeline.iter` is measured on new
steps until the steps repeat, so a slow disk or bucket makes it slower.
"""

import contextlib
import copy
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.bench.advice import Setting, accelerators, choose, reason
from grain_sft.bench.measuring import LIMIT, Next, limit, rate, seconds_a_batch, seconds_in_turn, seconds_waited
from grain_sft.bench.stages import WHOLE, facts, sample, stages
from grain_sft.pipeline import PREFETCH, Pipeline, batch_of_arrays
from grain_sft.source import RowSource
from grain_sft.storage import files

SECONDS = 20.0  # default time of all measurements together
STEPS_MS = (10.0, 50.0)  # default lengths of training steps
_MOST_THREADS = 16  # maximum number of threads to try; Grain reads with 16 threads by default
_MOST_WORKERS = 8  # maximum number of worker processes to try; each takes seconds to start
_REMOTE_THREADS = 4  # threads of each worker process if files are in a bucket

# Shares of `Plan.seconds` for the measurements.
_FIRST = 0.05  # the first batches
_STAGES = 0.1  # the batches for the stages of a step, and again the measurements of the stages
_THREADS = 0.4  # all settings without worker processes together
_WORKER = 0.1  # each setting with worker processes
_LAST = 0.15  # second measurement of the recommended setting


class _Round(NamedTuple):
    """One measurement of a setting."""

    seconds: float  # seconds per batch without training steps
    waits: dict[float, list[float]]  # seconds that each training step waited, by step length in ms


class Plan(NamedTuple):
    """Options of a measurement."""

    seconds: float = SECONDS  # time of all measurements together; slow batches may take longer
    repeats: int = 3  # number of measurements of each setting without worker processes
    steps_ms: Sequence[float] = STEPS_MS  # lengths of training steps for which the wait is measured
    max_workers: int | None = None  # maximum number of worker processes to try; None: one per core, at most 8
    tokens_per_second: float | None = None  # speed of one accelerator; None: the speeds in `advice.RATES`


def measure(pipeline: Pipeline, plan: Plan) -> dict[str, Any]:
    """Return everything that `grain-sft bench CONFIG` prints, ready for JSON. Write no file, not even the audit log."""
    run = _Run(pipeline, plan)
    first = run.first_reading()
    batches = sample(run.pipeline, run.steps, plan.seconds * _STAGES)
    batch = facts(batches)
    timed = stages(run.pipeline, batches)
    medians = seconds_in_turn(timed, plan.seconds * _STAGES / len(timed) / plan.repeats, plan.repeats, warm=1)

    def speed(seconds: float) -> dict[str, float]:
        """Return the figures of batches that take `seconds` each."""
        return rate(batch["tokens"], seconds, medians[LIMIT])

    def delivered(setting: Setting, rounds: list[_Round]) -> dict[str, Any]:
        """Return the figures of a setting, as medians of its rounds."""
        waits = []
        for step_ms in plan.steps_ms:
            waited = [seconds * 1e3 for measured in rounds for seconds in measured.waits[step_ms]]
            figures = {"median_ms": statistics.median(waited), "longest_ms": max(waited), "steps": len(waited)}
            waits.append({"step_ms": step_ms, **figures})
        seconds = statistics.median(measured.seconds for measured in rounds)
        return {**setting._asdict(), **speed(seconds), "waits": waits}

    measured, left_out = run.settings()
    rows = [delivered(setting, rounds) for setting, rounds in measured.items()]
    choice = choose(rows, first["slowest_ms"])
    recommended = delivered(choice.setting, run.last_rounds(choice.setting))
    # the table of stages states each stage's share of `whole`, the time of a whole step
    host, layout, whole = pipeline.sampler.host, pipeline.source.layout, medians[WHOLE]
    recommended |= {"step_ms": choice.step_ms, "reason": reason(choice, recommended, rows)}
    # a worker process has two buffers (see `_Run._round`), and its threads have a third one
    num_buffers = max(1, choice.setting.worker_count * (3 if choice.setting.threads else 2))
    recommended["buffer_bytes"] = batch["bytes"] * choice.setting.prefetch * num_buffers
    return {
        "layout": {
            "kind": type(layout).__name__,
            "rows": len(layout),
            "sequence_length": layout.sequence_length,
            "shortest_row": min(layout.row_lengths, default=layout.sequence_length),
        },
        "host": {"index": host.index, "count": host.count},
        "cores": cores(),
        "batch": batch,
        "first_reading": {**first, "mtok_per_s": batch["tokens"] / first["ms_per_batch"] / 1e3},
        "stages": [{"name": name, **speed(taken), "of_step": taken / whole} for name, taken in medians.items()],
        "delivered": rows,
        "left_out": left_out,
        "rows_read": run.next_step * int(run.pipeline.sampler.rows(0).size) * host.count / len(layout),  # in epochs
        "recommended": recommended,
        "accelerators": accelerators(recommended["mtok_per_s"] * 1e6, host.count, plan.tokens_per_second),
        "seconds": run.elapsed(),
    }


def report_speed(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """Return the speeds of the limit (copying a batch with numpy), of one thread and of the default number of threads.

    In the result, `tokens` is the number of tokens of a batch. Each item of `rows` has a `name` and the figures of `rate`.
    """
    endless, _ = first_steps_forever(pipeline)
    first = batch_of_arrays(endless, 0)
    loaders: dict[str, Next] = {
        LIMIT: limit(first),
        "one thread": endless.iter(threads=0).__next__,
        "default (prefetching threads)": endless.iter().__next__,
    }
    times, tokens = seconds_in_turn(loaders, seconds, turns=1, warm=3), facts([first])["tokens"]
    rows = [{"name": name, **rate(tokens, taken, times[LIMIT])} for name, taken in times.items()]
    return {"tokens": tokens, "seconds": seconds, "rows": rows}


def first_steps_forever(pipeline: Pipeline) -> tuple[Pipeline, int]:
    """Return a pipeline that repeats the steps before the first change of the batch size, and the number of these steps.

    The pipeline has no end, no observers and no audit log.
    """
    first = pipeline.first_step
    endless = copy.copy(pipeline)
    changes = [step for step, _ in pipeline.sampler.batch_sizes.schedule if step > first]
    # at least one step: if the run has none, reading it raises an error
    steps = min([max(first + 1, pipeline.sampler.end_of_batches), *changes]) - first
    repeated: Any = _FirstSteps(pipeline, steps)
    endless.audit, endless.observers, endless.sampler = None, (), repeated
    endless.withdrawals = pipeline.withdrawals and repeated
    return endless, steps


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Run:
    """Measurements of an endless copy of a pipeline. Each measurement begins after the steps that the one before it read."""

    def __init__(self, pipeline: Pipeline, plan: Plan) -> None:
        self._plan = plan
        self._begin = time.perf_counter()
        self.pipeline, self.steps = first_steps_forever(pipeline)  # `steps` is the number of steps that repeat
        self.next_step = 0  # first step that no measurement has read

    def elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def first_reading(self) -> dict[str, float]:
        """Measure the first batch, which opens files, and the next few batches. Return their times in ms, and their number."""
        times: list[float] = []
        while len(times) < 3 or sum(times[1:]) < self._plan.seconds * _FIRST:
            times.append(seconds_waited(lambda: self.pipeline[self.next_step], 0))
            self.next_step += 1
        first, *others = times
        figures = {"first_ms": first, "ms_per_batch": statistics.median(others), "slowest_ms": max(others)}
        return {"steps": len(times)} | {name: value * 1e3 for name, value in figures.items()}

    def settings(self) -> tuple[dict[Setting, list[_Round]], list[str]]:
        """Measure settings, fewest threads and processes first. Return the measurements, and the settings that were left out.

        A setting is left out if the time is up before it. Settings of 0 threads and 1 thread are always measured.
        """
        plan = self._plan
        end = plan.seconds * (1 - _LAST)
        remote = any(files.is_remote(shard.path) for shard in self.pipeline.source.layout.corpus.shards)
        # two threads are tried on one core too: one may wait for a file while the other works
        most = _MOST_THREADS if remote else min(_MOST_THREADS, max(2, cores()))
        most_workers = min(_MOST_WORKERS, cores()) if plan.max_workers is None else plan.max_workers
        threads = [Setting(count, PREFETCH, 0) for count in (0, *_doubled(most))]
        workers = [Setting(_REMOTE_THREADS if remote else 0, PREFETCH, count) for count in _doubled(most_workers)]
        measured: dict[Setting, list[_Round]] = {}
        for number, setting in enumerate([*threads * plan.repeats, *workers]):
            share = _WORKER if setting.worker_count else _THREADS / len(threads) / plan.repeats
            if number < 2 or self.elapsed() <= end:  # the first two: 0 threads, 1 thread
                measured.setdefault(setting, []).append(self._round(setting, plan.seconds * share))
        return measured, [str(setting) for setting in (*threads, *workers) if setting not in measured]

    def last_rounds(self, setting: Setting) -> list[_Round]:
        """Measure the recommended setting again: `repeats` times, or once if the time is up."""
        plan = self._plan
        rounds: list[_Round] = []
        while not rounds or (len(rounds) < plan.repeats and self.elapsed() <= plan.seconds):
            rounds.append(self._round(setting, plan.seconds * _LAST / plan.repeats))
        return rounds

    def _round(self, setting: Setting, seconds: float) -> _Round:
        """Measure a setting: half of the time without training steps, then with training steps of each length."""
        waits: dict[float, list[float]] = {step_ms: [] for step_ms in self._plan.steps_ms}
        # Maximum numbers of batches that are made or begun before `next` asks for them. Each worker process fills two buffers
        # of `prefetch` batches: its own, and one in the process that calls `next`. Three more batches may be under way: one
        # to each of the two buffers, and one to `next`.
        in_threads = setting.prefetch + setting.threads if setting.threads else 0
        in_processes = setting.worker_count * (in_threads + 2 * setting.prefetch + 3)
        with contextlib.closing(self.pipeline.iter(start_step=self.next_step, **setting._asdict())) as batches:
            next(batches)
            until = time.perf_counter() + seconds / 2
            # These batches are not timed, because they may have been made during the first `next`. Each thread may have made
            # two, and each process may have filled its buffers.
            for _ in range(in_processes or 2 * setting.threads):
                if time.perf_counter() <= until:
                    next(batches)
            batch_seconds = seconds_a_batch(batches.__next__, seconds / 2)
            for step_ms, waited in waits.items():
                begin = time.perf_counter()
                while len(waited) < 3 or time.perf_counter() - begin < seconds / 2 / len(waits):
                    waited.append(seconds_waited(batches.__next__, step_ms / 1e3))
        self.next_step = batches.next_step + (in_processes or in_threads)
        return _Round(batch_seconds, waits)


class _FirstSteps:
    """Sampler that repeats the first `count` steps of a pipeline. It is also used as the pipeline's `withdrawals`."""

    first_step, num_steps, end_step = 0, None, sys.maxsize

    def __init__(self, pipeline: Pipeline, count: int) -> None:
        sampler = pipeline.sampler
        sampler.check_from(sampler.first_step)
        self._pipeline, self._count, self.host = pipeline, count, sampler.host

    def _repeated(self, step: int) -> int:
        return self._pipeline.first_step + step % self._count

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        return self._pipeline.sampler.rows(self._repeated(step))

    def source_at(self, step: int) -> RowSource:
        return self._pipeline.source_at(self._repeated(step))

    def check_from(self, step: int) -> None:
        """Accept any step, because `__init__` has checked the steps that are repeated."""


def _doubled(most: int) -> list[int]:
    """Return the powers of two up to `most`, and `most` itself: [1, 2, 4, 6] for 6."""
    return sorted({*(1 << bit for bit in range(most.bit_length())), most} - {0})
