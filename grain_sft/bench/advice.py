"""Recommendation of arguments for `Pipeline.iter`, and the text of `grain-sft bench CONFIG`."""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grain_sft.bench import Table
from grain_sft.bench.measuring import SPEED
from grain_sft.pipeline import PREFETCH

# A setting keeps up with a step only if the median wait for the step's batch is at most the larger of these two.
TOLERATED_SHARE = 0.02  # share of the step
TOLERATED_MS = 0.5  # the time that waking a thread may take
AS_FAST = 0.9  # a speed that is at least this share of another counts as equal to it
RATES = (1_000, 5_000, 20_000, 100_000)  # speeds of accelerators in tokens/s, if the user gives none
_LEAST_PREFETCH, _MOST_PREFETCH = 4, 64  # bounds of a recommended `prefetch`
_WIDTH = 102  # columns

Row = Mapping[str, Any]
"""Figures of one measured setting, as in the list `delivered` of `grain_sft.bench.config.measure`."""


class Setting(NamedTuple):
    """Arguments of `Pipeline.iter`."""

    threads: int
    prefetch: int
    worker_count: int

    def __str__(self) -> str:
        return f"threads={self.threads}, prefetch={self.prefetch}, worker_count={self.worker_count}"


class Choice(NamedTuple):
    """A chosen setting. `step_ms` is the shortest measured step that the setting keeps up with; None if there is none."""

    setting: Setting
    step_ms: float | None


def choose(delivered: Sequence[Row], slowest_ms: float) -> Choice:
    """Return the setting with the fewest threads that keeps up with the shortest step, and a `prefetch` for it.

    If no number of threads keeps up with the shortest step, the next longer step is tried. Worker processes are chosen only if
    no number of threads keeps up with any step. A setting without threads and processes is never chosen: the trainer would wait
    for each slow read. If no setting keeps up with any step, the first one with at least 90 % of the highest speed is chosen.

    Args:
      delivered: Figures of each measured setting, fewest threads or processes first.
      slowest_ms: Longest time that a batch took to make.
    """
    threads = [row for row in delivered if row["threads"] and not row["worker_count"]]
    workers = [row for row in delivered if row["worker_count"]]
    for rows in (threads, workers):
        for step_ms in sorted({wait["step_ms"] for row in delivered for wait in row["waits"]}):
            row = next((row for row in rows if _keeps_up(row, step_ms)), None)
            if row is not None:
                # If the slowest batch takes 35 ms and a step takes 10 ms, the batches of 4 steps must be ready meanwhile. With
                # 2 worker processes, each needs only 2 of them. `needed` also counts the unfinished batch of each thread.
                steps_passed = math.ceil(slowest_ms / step_ms / max(1, row["worker_count"]))
                needed = steps_passed + max(1, row["threads"])
                power_of_two = 2 ** math.ceil(math.log2(needed))
                prefetch = min(_MOST_PREFETCH, max(_LEAST_PREFETCH, power_of_two))
                return Choice(Setting(row["threads"], prefetch, row["worker_count"]), step_ms)
    candidates = threads + workers
    fastest_ms = min(row["ms_per_batch"] for row in candidates)
    row = next(row for row in candidates if fastest_ms >= AS_FAST * row["ms_per_batch"])
    return Choice(Setting(row["threads"], PREFETCH, row["worker_count"]), None)


def reason(choice: Choice, recommended: Row, delivered: Sequence[Row]) -> str:
    """Return the reason for a recommendation, in one sentence.

    Args:
      choice: Result of `choose` for `delivered`.
      recommended: Figures of the chosen setting, measured once more.
      delivered: Figures of all measured settings.
    """
    shortest_ms = min(wait["step_ms"] for wait in recommended["waits"])
    longest_ms = max(wait["step_ms"] for wait in recommended["waits"])
    if choice.step_ms is None:
        wait = f"a step of {longest_ms:g} ms waits {_wait_ms(recommended, longest_ms):.2f} ms for its batch"
        longer_steps = f"a batch takes {recommended['ms_per_batch']:.2f} ms, so steps longer than that should not wait"
        return f"no measured setting is enough, and this is as fast as any: {wait}; {longer_steps}"
    threads, _, workers = choice.setting
    if workers:
        enough = f"threads alone are not enough, and worker_count={workers} is"
    elif threads == 1:
        enough = "one thread is enough"
    else:
        enough = f"{threads} threads are the fewest that are enough"
    no_threads = next(row for row in delivered if not row["threads"] and not row["worker_count"])
    wait = f"a step of {choice.step_ms:g} ms or more waits {_wait_ms(recommended, choice.step_ms):.2f} ms for its batch"
    sentence = f"{enough}: {wait}, and with threads=0 it waits {_wait_ms(no_threads, choice.step_ms):.2f} ms"
    if not _keeps_up(recommended, choice.step_ms):
        sentence += " (it kept up when it was first measured and does not now: measure again, for longer)"
    if choice.step_ms > shortest_ms:
        sentence += f"; a step of {shortest_ms:g} ms waits {_wait_ms(recommended, shortest_ms):.2f} ms"
    return sentence


def accelerators(tokens_per_second: float, hosts: int, speed: float | None) -> list[dict[str, float]]:
    """For each speed of an accelerator, return how many accelerators this host feeds, and how many all hosts feed.

    `tokens_per_second` is the speed at which one host makes batches. If `speed` is None, the speeds are `RATES`.
    """
    fed = {rate: int(tokens_per_second // rate) for rate in (RATES if speed is None else (speed,))}
    return [{"tokens_per_second": rate, "this_host": each, "all_hosts": each * hosts} for rate, each in fed.items()]


def _keeps_up(row: Row, step_ms: float) -> bool:
    """Return whether steps of `step_ms` don't wait for their batches.

    The first steps of a measurement use batches that were made ahead. They don't wait even if batches are made too slowly.
    So the mean time to make a batch must also be at most 90 % of the step (`AS_FAST`).
    """
    tolerated = max(TOLERATED_MS, TOLERATED_SHARE * step_ms)
    return _wait_ms(row, step_ms) <= tolerated and bool(row["ms_per_batch"] <= AS_FAST * step_ms)


def _wait_ms(row: Row, step_ms: float) -> float:
    """Return the median wait for a batch with steps of `step_ms`, one of the measured lengths."""
    return next(float(wait["median_ms"]) for wait in row["waits"] if wait["step_ms"] == step_ms)


def lines(figures: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield lines of text with the figures of `grain_sft.bench.config.measure`."""
    recommended, count = figures["recommended"], figures["host"]["count"]
    yield from _head(figures, name)
    yield ""
    columns = SPEED | {"of a step": "{of_step:.2f}"}
    yield from Table("", "stages (data in memory)", columns, {row["name"]: row for row in figures["stages"]}).lines()
    columns = dict(SPEED)
    for number, wait in enumerate(recommended["waits"]):
        columns[f"wait/{wait['step_ms']:g} ms"] = f"{{waits[{number}][median_ms]:.3f}}"
    delivered = {"delivered, consecutive steps": figures["delivered"], "recommended": [recommended]}
    for title, rows in delivered.items():
        yield ""
        named = {str(Setting(row["threads"], row["prefetch"], row["worker_count"])): row for row in rows}
        yield from Table("", title, columns, named).lines()
        if title != "recommended":
            yield from (f"{setting}: left out, the time was up" for setting in figures["left_out"])
    ready = f"The batches that are kept ready take {_size(recommended['buffer_bytes'])} of memory."
    yield from textwrap.wrap(f"{recommended['reason']}. {ready}", _WIDTH, initial_indent="  ", subsequent_indent="  ")
    yield ""
    columns = {"on this host": "{this_host:,}"}
    if count > 1:
        columns[f"on {count} such hosts"] = "{all_hosts:,}"
    fed = {f"{row['tokens_per_second']:,.0f} tokens/s": row for row in figures["accelerators"]}
    yield from Table("", "it feeds accelerators of", columns, fed).lines()


def _head(figures: Mapping[str, Any], name: str) -> Iterator[str]:
    """Yield the lines before the tables."""
    layout, batch, host, first = (figures[key] for key in ("layout", "batch", "host", "first_reading"))
    padding = "" if batch["padding_share"] is None else f", padding {batch['padding_share']:.3%}"
    sizes = f"{batch['rows']:,} rows, {batch['tokens']:,.0f} tokens{padding}"
    speed = f"{first['ms_per_batch']:.3f} ms a batch, {first['mtok_per_s']:.1f} Mtok/s"
    slowest = f"the slowest {first['slowest_ms']:.3f} ms"
    length = f"{layout['sequence_length']:,}"
    if layout["shortest_row"] < layout["sequence_length"]:
        length = f"{layout['shortest_row']:,} to {length}"
    yield f"config         {name}: {layout['rows']:,} rows of {length} tokens, {layout['kind']}"
    yield f"batch          of host {host['index']} of {host['count']}: {sizes}"
    yield f"               {batch['arrays']} arrays, {_size(batch['bytes'])}"
    yield f"machine        {figures['cores']} cores"
    yield f"first reading  {first['first_ms']:.1f} ms for the first batch, which opens files; then {speed}; {slowest}"
    yield f"taken          {figures['seconds']:.0f} s; rows read: {figures['rows_read']:,.2f} times the rows of the config"


def _size(count: float) -> str:
    """Return a number of bytes as text, such as "1.5 MB"."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
