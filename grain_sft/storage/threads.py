"""`in_threads`: calls of a function in several threads."""

import concurrent.futures
import contextvars
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

FEW_THREADS = min(8, os.cpu_count() or 1)
"""Number of threads for calls that mostly compute."""
MANY_THREADS = 32
"""Number of threads for calls that mostly wait for a disk or a bucket."""


def in_threads(function: Callable[..., T], *columns: Iterable[Any], threads: int = FEW_THREADS) -> Iterator[T]:
    """Yield the results of `map(function, *columns)`, in order. The calls run in `threads` threads.

    Call i gets item i of each of the `columns` as an argument. The calls have the caller's context variables, such as the
    `root` of `open_corpus`.
    """
    context = contextvars.copy_context()  # two threads can't run in one context, so each call runs in a copy
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        yield from pool.map(lambda *values: context.copy().run(function, *values), *columns)
