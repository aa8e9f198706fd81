"""Progress of long work on stderr."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

EVERY = 5.0  # seconds between lines, if stderr is not a terminal
_REWRITTEN_EVERY = 0.2  # seconds between changes of the line on a terminal
_BAR_COLUMNS = 30

Progress = Callable[[str, int, int], None]
"""Function that takes the name of the work, the amount that is done, and the total amount in the same unit."""
T = TypeVar("T")


@contextlib.contextmanager
def progress_bar() -> Iterator[Progress]:
    """Yield a function that shows on stderr how much of the work is done, and the time that is left."""
    terminal = is_terminal(sys.stderr)
    work, done_at_begin, began, shown = "", 0, 0.0, 0.0

    def show(what: str, done: int, total: int) -> None:
        """Print a line, unless the last line was printed a moment ago or `what` has just begun."""
        nonlocal work, done_at_begin, began, shown
        now = time.monotonic()
        if what != work or done < done_at_begin:  # other work, or the same work from its beginning
            work, done_at_begin, began, shown = what, done, now, now
        if now - shown < (_REWRITTEN_EVERY if terminal else EVERY):
            return
        shown = now
        part, rate = done / max(1, total), (done - done_at_begin) / (now - began)
        left = f", {(total - done) / rate:.0f} s left" if rate else ""
        bar = f" {'━' * int(part * _BAR_COLUMNS):<{_BAR_COLUMNS}}" if terminal else ":"
        _show(f"{what}{bar} {part:.0%}{left}", terminal)

    try:
        yield show
    finally:
        if terminal:
            _show("", terminal)


@contextlib.contextmanager
def elapsed(what: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr how many seconds the work `what` has taken.

    Yields:
      Function that changes the name of the work.
    """
    # the last of `names` is shown
    names, ended, began = [what], threading.Event(), time.monotonic()
    terminal = is_terminal(sys.stderr)

    def show() -> None:
        while not ended.wait(1.0 if terminal else EVERY):
            _show(f"{names[-1]}: {time.monotonic() - began:.0f} s", terminal)
        if terminal:
            _show("", terminal)

    thread = threading.Thread(target=show, name="elapsed", daemon=True)
    thread.start()
    try:
        yield names.append
    finally:
        ended.set()
        thread.join()


def with_progress(results: Iterable[T], total: int, what: str) -> Iterator[T]:
    """Yield `results`. If stderr is a terminal, show how many of the `total` results were yielded. `what` names the work."""
    with progress_bar() as show:
        for number, result in enumerate(results):
            if is_terminal(sys.stderr):
                show(what, number, total)
            yield result


def is_terminal(stream: object) -> bool:
    """Return whether a stream is a terminal. An object without the method `isatty`, such as None, is not a terminal."""
    return bool(getattr(stream, "isatty", bool)())  # `bool()` is False


def _show(line: str, terminal: bool) -> None:
    """Print a line. On a terminal, it replaces the last line."""
    before, after = ("\r\x1b[K", "") if terminal else ("", "\n")
    with contextlib.suppress(OSError):  # a closed stderr does not end the work
        print(f"{before}{line}", end=after, file=sys.stderr, flush=True)
