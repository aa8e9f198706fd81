"""How far a long command is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

EVERY = 5.0  # seconds between lines of progress where there is no terminal


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar with rate and time left on a terminal that has rich (extra `progress`), else a line now and then."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        except ImportError:
            pass
        else:
            columns = ("{task.description}", BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
            with Progress(
                *columns, TransferSpeedColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True
            ) as bars:
                known: dict[str, Any] = {}

                def show(what: str, done: int, total: int) -> None:
                    if what not in known:
                        known[what] = bars.add_task(what, total=total, completed=done)
                    bars.update(known[what], completed=done, total=total)

                yield show
            return
    yield _Lines()


@contextlib.contextmanager
def elapsed(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr how long a step has taken whose end is not known: a line on a terminal that is rewritten each second,
    else a new line every `EVERY` seconds. Nothing is left on the terminal.

    Args:
      what: Name of the step.

    Yields:
      A function that renames the step.
    """
    names, ended, begin = [what], threading.Event(), time.monotonic()
    terminal = sys.stderr.isatty()
    before, after = ("\r\x1b[K", "") if terminal else ("", "\n")

    def show() -> None:
        while not ended.wait(1.0 if terminal else EVERY):
            print(f"{before}{names[-1]}: {time.monotonic() - begin:.0f} s", end=after, file=sys.stderr, flush=True)
        if terminal:
            print(before, end="", file=sys.stderr, flush=True)

    thread = threading.Thread(target=show, name="elapsed", daemon=True)
    thread.start()
    try:
        yield names.append
    finally:
        ended.set()
        thread.join()


class _Lines:
    """Progress as lines on stderr."""

    def __init__(self) -> None:
        self._what = ""
        self._began = self._said = time.monotonic()
        self._from = 0

    def __call__(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._what:
            self._what, self._began, self._from, self._said = what, now, done, now
        if now - self._said < EVERY:
            return
        self._said = now
        rate = (done - self._from) / (now - self._began)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        print(f"{what}: {done / max(1, total):.0%}{left}", file=sys.stderr, flush=True)
