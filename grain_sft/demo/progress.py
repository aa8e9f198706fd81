"""Displays of a run's progress: functions from records, as they come, to the same records."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Iterable

from grain_sft.demo.log import Record

LINES_EVERY = 10  # steps

Records = Generator[Record, None, None]
Display = Callable[[Iterable[Record], int, int, int], Records]
"""Takes records, the first step, the number of steps in all, and tokens in a step."""


def display() -> Display:
    """A bar where stdout is a terminal and rich is installed; otherwise a line every `LINES_EVERY` steps."""
    if sys.stdout.isatty():
        try:
            import rich

            if not rich.get_console().is_dumb_terminal:
                return bar
        except ImportError:
            pass
    return lines


def lines(records: Iterable[Record], start: int, steps: int, tokens: int) -> Records:
    """Print a line at the first step, every tenth and the last."""
    clock = _Clock(tokens)
    for record in records:
        rate = clock.tokens_per_second(record.step)
        if record.step in (start, steps - 1) or record.step % LINES_EVERY == 0:
            print(f"  step {record.step:4d}  loss {record.loss:.4f}  {rate}", flush=True)
        yield record


def bar(records: Iterable[Record], start: int, steps: int, tokens: int) -> Records:
    """Draw a bar with the step, the loss and the tokens in a second."""
    from rich import progress

    columns = (
        progress.TextColumn("  step {task.completed:>4.0f} of {task.total:.0f}"),
        progress.BarColumn(),
        progress.TextColumn("loss {task.fields[loss]}  {task.fields[rate]}"),
    )
    clock = _Clock(tokens)
    with progress.Progress(*columns) as shown:
        task = shown.add_task("", total=steps, completed=start, loss="-", rate="compiling")
        for record in records:
            rate = clock.tokens_per_second(record.step)
            shown.update(task, completed=record.step + 1, loss=f"{record.loss:.4f}", rate=rate)
            yield record


class _Clock:
    """Speed since the first step, which compiles and is left out."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._first: tuple[int, float] | None = None

    def tokens_per_second(self, step: int) -> str:
        now = time.perf_counter()
        if self._first is None:
            self._first = step, now
            return "compiled"
        first, since = self._first
        return f"{(step - first) * self._tokens / max(now - since, 1e-9):,.0f} tokens/s"
