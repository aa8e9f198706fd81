"""Many files at once: threads, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

THREADS = 32  # a scan waits for the disk or for a bucket, not for the processor
_PROGRESS_FROM = 64  # files; fewer are done before a bar could be read

T = TypeVar("T")


def with_progress(results: Iterable[T], total: int) -> Iterator[T]:
    """Yield `results`, with a bar on a terminal where rich is installed and there are many."""
    if total < _PROGRESS_FROM or not sys.stderr.isatty():
        yield from results
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from results
        return
    yield from track(results, "Scanning files", total=total, console=Console(stderr=True), transient=True)
