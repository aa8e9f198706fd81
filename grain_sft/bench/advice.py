"""What measured settings of `pipeline.iter` recommend: which to take, why, and how many accelerators they feed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from grain_sft.pipeline.iterator import PREFETCH

FELT = 0.02  # of a step: a median wait up to this is nothing that a trainer feels
LEAST_MS = 0.5  # nor is this: what a thread that slept takes to get going again, where others use the machine too
AS_FAST = 0.9  # of the fastest: such settings are told apart by what they take, not by their speed
RATES = (1_000, 5_000, 20_000, 100_000)  # tokens/s of an accelerator, where none is given
_LEAST_PREFETCH, _MOST_PREFETCH = 4, 64

Row = Mapping[str, Any]


class Setting(NamedTuple):
    """Arguments of `Pipeline.iter`."""

    threads: int
    prefetch: int
    worker_count: int

    def __str__(self) -> str:
        return f"threads={self.threads}, prefetch={self.prefetch}, worker_count={self.worker_count}"


class Choice(NamedTuple):
    """A setting, and the shortest step, in ms, of those measured, beside which nothing is waited for; None: each waits."""

    setting: Setting
    step_ms: float | None


def choose(delivered: Sequence[Row], slowest_ms: float) -> Choice:
    """The setting of fewest threads and processes beside whose batches a trainer does not wait.

    At least one thread, so that a slow read does not reach the trainer. Threads go before worker processes, also where
    these would do for a shorter step; where nothing will do, it is the fastest.

    Args:
      delivered: measured settings, fewest resources first, each with its `waits` by step.
      slowest_ms: the longest that a batch took to make: so much is made ahead.
    """
    threads = [row for row in delivered if row["threads"] and not row["worker_count"]]
    workers = [row for row in delivered if row["worker_count"]]
    steps = sorted({wait["step_ms"] for row in delivered for wait in row["waits"]})
    for rows in (threads, workers):
        for step_ms in steps:
            row = next((row for row in rows if _keeps_up(row, step_ms)), None)
            if row is not None:
                return Choice(_setting(row, _prefetch(row, slowest_ms, step_ms)), step_ms)
    able = threads + workers or list(delivered)
    fastest = min(row["ms_per_batch"] for row in able)
    row = next(row for row in able if fastest >= AS_FAST * row["ms_per_batch"])
    return Choice(_setting(row, PREFETCH), None)


def is_felt(wait_ms: float, step_ms: float) -> bool:
    """Whether a median wait of so many ms counts beside a step of so many."""
    return wait_ms > max(LEAST_MS, FELT * step_ms)


def _keeps_up(row: Row, step_ms: float) -> bool:
    """Whether a setting is not waited for, and would not be later: what is kept ready hides for a while that batches take
    longer than steps."""
    return not is_felt(wait_of(row, step_ms), step_ms) and bool(row["ms_per_batch"] <= AS_FAST * step_ms)


def wait_of(row: Row, step_ms: float) -> float:
    """The median wait of a setting, in ms, beside steps of `step_ms`."""
    return next(float(wait["median_ms"]) for wait in row["waits"] if wait["step_ms"] == step_ms)


def reason(choice: Choice, recommended: Row, delivered: Sequence[Row]) -> str:
    """Why that is recommended, in one sentence."""
    direct = next(row for row in delivered if not row["threads"] and not row["worker_count"])
    steps = sorted(wait["step_ms"] for wait in recommended["waits"])
    made = recommended["ms_per_batch"]
    if choice.step_ms is None:
        waited = wait_of(recommended, steps[-1])
        return (
            f"nothing measured is enough, and this is as fast as any: a step of {steps[-1]:g} ms waits {waited:.2f} ms for its "
            f"batch; steps of more than the {made:.2f} ms that a batch takes should not wait"
        )
    said = (
        f"{_enough(choice.setting)}: a step of {choice.step_ms:g} ms or more waits "
        f"{wait_of(recommended, choice.step_ms):.2f} ms for its batch, where with threads=0 it waits "
        f"{wait_of(direct, choice.step_ms):.2f} ms"
    )
    if not _keeps_up(recommended, choice.step_ms):
        said += " (measured by itself it does not keep up, as it did beside the others: measure again, for longer)"
    if choice.step_ms > steps[0]:
        said += f"; a step of {steps[0]:g} ms waits {wait_of(recommended, steps[0]):.2f} ms"
    return said


def _enough(setting: Setting) -> str:
    if setting.worker_count:
        return f"threads alone are not enough, and worker_count={setting.worker_count} is"
    return (
        "one thread is enough" if setting.threads == 1 else f"{setting.threads} threads are the fewest that are enough"
    )


def accelerators(tokens_per_second: float, hosts: int, each: float | None) -> list[dict[str, float]]:
    """How many accelerators batches of so many tokens/s, on each of `hosts` hosts, could feed.

    Args:
      each: tokens/s of one accelerator; None: for each of `RATES`.
    """
    return [
        {"tokens_per_second": rate, "this_host": here, "all_hosts": here * hosts}
        for rate in (RATES if each is None else (each,))
        for here in (int(tokens_per_second // rate),)
    ]


def _setting(row: Row, prefetch: int) -> Setting:
    return Setting(row["threads"], prefetch, row["worker_count"])


def _prefetch(row: Row, slowest_ms: float, step_ms: float) -> int:
    """Batches to keep ready, in each worker: the steps that the slowest batch lasts for, and those in the making; a power
    of 2."""
    workers = max(1, row["worker_count"])
    needed = math.ceil(slowest_ms / step_ms / workers) + max(1, row["threads"])
    return int(min(_MOST_PREFETCH, max(_LEAST_PREFETCH, 2 ** math.ceil(math.log2(needed)))))
