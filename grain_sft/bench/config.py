"""Speed of a config's pipeline on this machine: of its stages, over steps that were read before; and of what `iter` delivers,
over consecutive steps, as in a run, so that a corpus on a slow disk or in a bucket has the figures of its first epoch."""

import contextlib
import copy
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grain_sft.bench.advice import Setting, accelerators, choose, reason
from grain_sft.bench.measuring import LIMIT, Next, limit, rate, seconds_a_batch, seconds_in_turn, seconds_waited
from grain_sft.layout import FILL_ROW, padding_share
from grain_sft.pipeline import PREFETCH, Pipeline
from grain_sft.source import Element, RowSource
from grain_sft.storage import files

ROW_NUMBERS = "row numbers"
READING = "reading"
PIECES = "  of it, the pieces of rows"
WHOLE = "a whole step"
_TOKENS = ("inputs", "tokens", "prompt_ids", "chosen_ids", "rejected_ids")  # keys of the tokens of a batch
_BYTES = 1 << 27  # of batches that are kept for each stage
_STEPS = 16  # most batches of a sample

SECONDS = 20.0
STEPS_MS = (10.0, 50.0)
_MOST_THREADS = 16  # what Grain reads with
_MOST_WORKERS = 8  # each takes seconds to start
_REMOTE_THREADS = 4  # in a worker whose files are in a bucket; it only waits

# shares of the time; settings with worker processes are measured until the rest is used up
_FIRST, _STAGES, _THREADS, _WORKER, _LAST = 0.05, 0.1, 0.4, 0.1, 0.15

# seconds a batch, and the seconds that each step waited, by the ms of the step
_Round = tuple[float, dict[float, list[float]]]


class Plan(NamedTuple):
    """Options of a measurement."""

    seconds: float = SECONDS  # of all measurements together; a slow batch takes longer
    repeats: int = 3  # measurements of each setting, in turn
    steps_ms: Sequence[float] = STEPS_MS  # steps of a training that waits for batches
    max_workers: int | None = None  # worker processes that are tried; None: as many as there are cores, up to 8
    tokens_per_second: float | None = None  # of one accelerator


def measure(pipeline: Pipeline, plan: Plan) -> dict[str, Any]:
    """Return everything that `grain-sft bench CONFIG` prints, ready for JSON. Nothing is written, no audit log either.

    Raises:
      RowIndexError, CorpusFileError, TransformError: as the pipeline's batches do.
    """
    run = _Run(pipeline, plan)
    first = run.first_reading()
    batches = sample(run.pipeline, run.steps, plan.seconds * _STAGES)
    batch, timed = facts(batches), stages(run.pipeline, batches)
    medians = seconds_in_turn(timed, plan.seconds * _STAGES / len(timed) / plan.repeats, plan.repeats, warm=1)

    def speed(seconds: float) -> dict[str, float]:
        return rate(batch["tokens"], seconds, medians[LIMIT])

    def delivered(setting: Setting, rounds: list[_Round]) -> dict[str, Any]:
        waits = []
        for step_ms in plan.steps_ms:
            found = [wait * 1e3 for _, by_step in rounds for wait in by_step[step_ms]]
            figures = {"median_ms": statistics.median(found), "longest_ms": max(found), "steps": len(found)}
            waits.append({"step_ms": step_ms, **figures})
        taken = statistics.median(seconds for seconds, _ in rounds)
        return {**setting._asdict(), **speed(taken), "waits": waits}

    measured, left_out = run.settings()
    rows = [delivered(setting, rounds) for setting, rounds in measured.items()]
    choice = choose(rows, first["slowest_ms"])
    recommended = delivered(choice.setting, run.last_rounds(choice.setting))
    host, layout = pipeline.sampler.host, pipeline.source.layout
    recommended |= {"step_ms": choice.step_ms, "reason": reason(choice, recommended, rows)}
    recommended["buffer_bytes"] = batch["bytes"] * choice.setting.prefetch * max(1, choice.setting.worker_count)
    whole = medians[WHOLE]
    return {
        "layout": {
            **{"kind": type(layout).__name__, "rows": len(layout), "sequence_length": layout.sequence_length},
            "shortest_row": min(layout.row_lengths, default=layout.sequence_length),
        },
        "host": {"index": host.index, "count": host.count},
        "cores": cores(),
        "batch": batch,
        "first_reading": {**first, "mtok_per_s": batch["tokens"] / first["ms_per_batch"] / 1e3},
        "stages": [{"name": name, **speed(taken), "of_step": taken / whole} for name, taken in medians.items()],
        "delivered": rows,
        "left_out": left_out,
        "rows_read": run.next_step * int(run.pipeline.sampler.rows(0).size) * host.count / len(layout),
        "recommended": recommended,
        "accelerators": accelerators(recommended["mtok_per_s"] * 1e6, host.count, plan.tokens_per_second),
        "seconds": run.elapsed(),
    }


def report_speed(pipeline: Pipeline, seconds: float) -> dict[str, Any]:
    """Return `rows`, the names and the figures of `rate` of the limit, of one thread, and of the default threads, for a
    config's report; the `tokens` of a batch; and the `seconds` of each measurement."""
    endless = first_steps_forever(pipeline)[0]
    first = endless[0]
    loaders: dict[str, Next] = {
        LIMIT: limit(first),
        "one thread": endless.iter(threads=0).__next__,
        "default (prefetching threads)": endless.iter().__next__,
    }
    times, tokens = seconds_in_turn(loaders, seconds, turns=1, warm=3), facts([first])["tokens"]
    rows = [{"name": name, **rate(tokens, taken, times[LIMIT])} for name, taken in times.items()]
    return {"tokens": tokens, "seconds": seconds, "rows": rows}


def first_steps_forever(pipeline: Pipeline) -> tuple[Pipeline, int]:
    """Return the pipeline without observers and without an end, the steps of its first batch size again and again, and the
    number of these steps."""
    first, endless = pipeline.first_step, copy.copy(pipeline)
    changes = [step for step, _ in pipeline.sampler.batch_sizes.schedule if step > first]
    steps = min([pipeline.end_step, *changes]) - first
    repeated: Any = _FirstSteps(pipeline, steps)
    endless.audit, endless.observers, endless.sampler = None, (), repeated
    endless.withdrawals = pipeline.withdrawals and repeated
    return endless, steps


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Run:
    """A pipeline without an end. Each measurement takes its next batches."""

    def __init__(self, pipeline: Pipeline, plan: Plan) -> None:
        self._plan, self._begin = plan, time.perf_counter()
        self.pipeline, self.steps = first_steps_forever(pipeline)  # the same `steps` come again and again
        self.next_step = 0  # first step that no measurement has read

    def elapsed(self) -> float:  # seconds since the measurements began
        return time.perf_counter() - self._begin

    def first_reading(self) -> dict[str, float]:
        """Measure batches made one by one when asked; the first, which opens files, apart."""
        times: list[float] = []
        while len(times) < 3 or sum(times[1:]) < self._plan.seconds * _FIRST:
            times.append(seconds_waited(lambda: self.pipeline[self.next_step], 0))
            self.next_step += 1
        first, *others = times
        figures = {"first_ms": first, "ms_per_batch": statistics.median(others), "slowest_ms": max(others)}
        return {"steps": len(times)} | {name: value * 1e3 for name, value in figures.items()}

    def settings(self) -> tuple[dict[Setting, list[_Round]], list[str]]:
        """Measure settings, fewest resources first; return also those for which there was no time."""
        plan, late = self._plan, self._plan.seconds * (1 - _LAST)
        remote = any(files.is_remote(shard.path) for shard in self.pipeline.source.layout.corpus.shards)
        most = _MOST_THREADS if remote else min(_MOST_THREADS, max(2, cores()))
        most_workers = min(_MOST_WORKERS, cores()) if plan.max_workers is None else plan.max_workers
        threads = [Setting(count, PREFETCH, 0) for count in (0, *_doubled(most))]
        workers = [Setting(_REMOTE_THREADS if remote else 0, PREFETCH, count) for count in _doubled(most_workers)]
        measured: dict[Setting, list[_Round]] = {}
        for number, setting in enumerate([*threads * plan.repeats, *workers]):
            part = _WORKER if setting.worker_count else _THREADS / len(threads) / plan.repeats
            if number < 2 or self.elapsed() <= late:  # without threads and with one thread always
                measured.setdefault(setting, []).append(self._round(setting, plan.seconds * part))
        return measured, [str(setting) for setting in (*threads, *workers) if setting not in measured]

    def last_rounds(self, setting: Setting) -> list[_Round]:
        """Measure the recommended setting alone; only once if the time is up."""
        plan, rounds = self._plan, list[_Round]()
        while not rounds or (len(rounds) < plan.repeats and self.elapsed() <= plan.seconds):
            rounds.append(self._round(setting, plan.seconds * _LAST / plan.repeats))
        return rounds

    def _round(self, setting: Setting, seconds: float) -> _Round:
        """Measure a setting: half of the time as fast as possible, then with a trainer that takes each of the steps."""
        waits: dict[float, list[float]] = {step_ms: [] for step_ms in self._plan.steps_ms}
        with contextlib.closing(self.pipeline.iter(start_step=self.next_step, **setting._asdict())) as batches:
            next(batches)
            until = time.perf_counter() + seconds / 2
            for _ in range(2 * setting.threads + setting.worker_count * (setting.prefetch + 2)):
                if time.perf_counter() <= until:  # the batches that were made at the start are not measured
                    next(batches)
            taken = seconds_a_batch(batches.__next__, seconds / 2)
            for step_ms, found in waits.items():
                begin = time.perf_counter()
                while len(found) < 3 or time.perf_counter() - begin < seconds / 2 / len(waits):
                    found.append(seconds_waited(batches.__next__, step_ms / 1e3))
        made_ahead = setting.prefetch * max(1, setting.worker_count) + setting.threads
        self.next_step = batches.next_step + (made_ahead if setting.threads or setting.worker_count else 0)
        return taken, waits


class _FirstSteps:
    """Sampler and withdrawals of the first `count` steps of a pipeline, again and again."""

    first_step, num_steps, end_step = 0, None, sys.maxsize

    def __init__(self, pipeline: Pipeline, count: int) -> None:
        sampler = pipeline.sampler
        sampler.check_from(sampler.first_step)
        self._pipeline, self._count, self.host = pipeline, count, sampler.host
        self.data_key = f"first {count} steps of {sampler.data_key}"

    def _planned(self, step: int) -> int:
        return self._pipeline.first_step + step % self._count

    def rows(self, step: int) -> npt.NDArray[np.int64]:
        return self._pipeline.sampler.rows(self._planned(step))

    def source_at(self, step: int) -> RowSource:
        return self._pipeline.source_at(self._planned(step))

    def check_from(self, step: int) -> None:
        """Accept any step: all are like the first."""


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4 and so on up to `most`, and `most`."""
    return sorted({*(1 << bit for bit in range(most.bit_length())), most} - {0})


def sample(pipeline: Pipeline, steps: int, seconds: float) -> list[Element]:
    """Return the batches of the first steps: at most `steps` of them, read in `seconds` and limited in memory."""
    until = time.perf_counter() + seconds
    batches = [pipeline[0]]
    count = min(_STEPS, steps, _BYTES // max(1, facts(batches)["bytes"]))
    while len(batches) < count and time.perf_counter() < until:
        batches.append(pipeline[len(batches)])
    return batches


def stages(pipeline: Pipeline, batches: list[Element]) -> dict[str, Next]:
    """Return functions that run one stage for the steps of `batches` in turn, by name: the limit, then stages in order.

    Each stage gets the kept results of the stage before it. A whole step may take less time than its stages together,
    because `ShiftTargets` as the first transform reads the rows itself, in fewer passes.
    """
    steps = range(len(batches))
    rows = [pipeline.sampler.rows(step) for step in steps]

    def read(step: int) -> Element:
        return pipeline.source_at(step).read(rows[step])

    timed: dict[str, Next] = {
        LIMIT: limit(batches[0]),
        ROW_NUMBERS: _in_turn(steps, pipeline.sampler.rows),
        READING: _in_turn(steps, read),
        PIECES: _in_turn([each[each != FILL_ROW] for each in rows], pipeline.source.layout.pieces),
    }
    elements = [read(step) for step in steps]
    for number, transform in enumerate(pipeline.transforms):
        name = type(transform).__name__
        timed[name if name not in timed else f"{name} ({number + 1})"] = _in_turn(elements, transform.map)
        elements = [transform.map(each) for each in elements]
    timed[WHOLE] = _in_turn(steps, pipeline.__getitem__)
    return timed


def facts(batches: Sequence[Element]) -> dict[str, Any]:
    """Return the rows, bytes and number of arrays of the first batch (an array under two keys counts once, scalars do not), the
    mean tokens of all batches with padding, and the share of padding, None for batches without segments."""
    arrays = {id(array): array for array in batches[0].values() if np.ndim(array)}.values()
    keys = [key for key in _TOKENS if key in batches[0]] or [*batches[0]][:1]
    sizes = [sum(batch[key].size for key in keys) for batch in batches]
    key = next((key for key in ("inputs_segmentation", "segment_ids") if key in batches[0]), None)
    unpadded = None if key is None else sum(np.count_nonzero(batch[key]) for batch in batches)
    return {
        "rows": len(next(iter(arrays))),
        "tokens": statistics.mean(sizes),
        "padding_share": None if unpadded is None else padding_share(int(unpadded), sum(sizes)),
        "bytes": sum(array.nbytes for array in arrays),
        "arrays": len(arrays),
    }


def _in_turn(values: Iterable[Any], function: Callable[[Any], Any]) -> Next:
    cycle = itertools.cycle(values)
    return lambda: function(next(cycle))
