"""ReadAhead: threads that make the results of the next steps, such as batches, ahead of time."""

import _thread
import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from grain_sft.errors import PipelineError

T = TypeVar("T")

_CHECKED_EVERY = 1.0  # seconds after which a waiting `get` checks again that the result can still come
_ENDS_IN = 5.0  # seconds that the end of the interpreter waits for threads to finish their steps


class Result(Generic[T]):
    """Result of one step: `value` or `error`.

    The thread that acquires the lock `claimed` makes the result. It sets `value` or `error`, sets `ready` to True, and releases
    the lock `done`, which is locked from the beginning.
    """

    __slots__ = ("claimed", "done", "error", "ready", "value")

    def __init__(self) -> None:
        self.claimed, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.ready = False
        self.value: T | None = None
        self.error: BaseException | None = None


class ReadAhead(Generic[T]):
    """Results of `make(step)` for consecutive steps, made by threads up to `ahead` steps before `get` asks for them.

    Ctrl-C may raise an exception at any point of the caller's thread. No result is lost, because a result stays until `advance`
    drops it. `get` and `advance` use no `Future`, `Event`, `Queue` or `Thread.start`: an exception may leave the
    `threading.Condition` in these locked for good. A `SimpleQueue` has no `Condition`.

    Callers in several threads have to lock each call of a method.

    Args:
      make: Function that makes the result of a step. A single thread (`threads` 1) calls it in the order of the steps.
      start, end: First step, and the step after the last.
      ahead: Number of steps that are made in advance, at least 1.
      threads: Number of threads, which start with the first `advance`.
      name: Prefix of the names of the threads.
      close: Function that the method `close` calls. Any thread may call it.
      check: Function that `get` calls each second while it waits. It raises an error if the result can't come any more.

    Attributes:
      results: Results by step, ascending, from the step of the last `advance` on. The caller may read a result that is ready,
        and set its `value` to None once it has taken the value.
      due: After it has taken the result of a step k >= `due`, the caller has to call `advance(k + 1)`. After earlier steps, it
        may leave out the call, which saves 10 to 20 us a step. It is -1 before the first `advance`.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        *,
        start: int,
        end: int,
        ahead: int,
        threads: int,
        name: str,
        close: Callable[[], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._make, self._close, self._check = make, close, check
        # `_next` is the first step that no call of `advance` has requested
        self._next, self._end, self._ahead, self._half = start, end, ahead, ahead // 2
        self.due = -1
        self.results: dict[int, Result[T]] = {}
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # an integer wakes a thread, and None ends one
        names = [f"{name}_{number}" for number in range(threads)]
        self.threads = [threading.Thread(target=self._work, name=each, daemon=True) for each in names]
        self._starting, self._started, self._closed = threading.Lock(), False, False
        _open_readers.add(self)

    def get(self, step: int) -> Result[T]:
        """Wait for the result of `step`, and return it. `step` must not be before the step of the last `advance`."""
        result = self.results.get(step)
        if result is None or not result.ready:
            self.advance(step)
            # If a signal handler called `close`, `results` is empty. Then the loop waits for a new result, and sees `_closed`.
            result = self.results.setdefault(step, Result())
            # `done` is not released after this wait, because later calls see that `ready` is True
            while not result.ready and not result.done.acquire(timeout=_CHECKED_EVERY):
                if self._closed:
                    problem = f"the iterator was closed while step {step} was awaited"
                    raise PipelineError(f"{problem}. Make another with pipeline.iter(start_step={step}).")
                if self._check is not None:
                    self._check()
        return result

    def advance(self, step: int) -> None:
        """Drop the results before `step`. If at most half of the next `ahead` steps are requested, request all of them."""
        results = self.results
        while results and (before := next(iter(results))) < step:
            results.pop(before, None)
        if self._next - step > self._half and self._started:
            return
        end = min(step + self._ahead, self._end)
        for wanted in range(self._next, end):
            results.setdefault(wanted, Result())
        if end > self._next:
            # After an exception here, the next call wakes the threads again. This does no harm: only one
            # thread can claim a result.
            for _ in self.threads:
                self._wanted.put(end)
            self._next = end
        self.due = self._next - self._half - 1
        if not self._started:
            _thread.start_new_thread(self._start, ())

    def close(self) -> None:
        """Drop the results, and let each thread end after the step that it is making."""
        self._wanted.put(None)
        self.results, self._closed = {}, True
        if self._close is not None:
            self._close()

    def _start(self) -> None:
        """Start the threads, once. This runs in a separate thread, which Ctrl-C does not reach."""
        if not self._starting.acquire(blocking=False):  # never released, so that only the first call starts threads
            return
        started = 0
        with contextlib.suppress(RuntimeError):  # the system allows no more threads
            for thread in self.threads:
                thread.start()
                started += 1
        self._started = True
        if not started:
            self._work()  # this thread makes all results

    def _work(self) -> None:
        """Make all results that no thread has claimed, each time steps are requested. End when the reader is closed."""
        while self._wanted.get() is not None:
            for step in list(self.results):
                result = self.results.get(step)
                if result is None or not result.claimed.acquire(blocking=False):
                    continue
                try:
                    result.value = self._make(step)
                except BaseException as error:
                    result.error = error
                result.ready = True
                result.done.release()
                del result  # while this thread waits, it must not keep a batch that the caller has taken
        self._wanted.put(None)  # ends the next thread, because `close` puts only one None


_open_readers: weakref.WeakSet[ReadAhead[Any]] = weakref.WeakSet()


def _refuse(step: int) -> NoReturn:
    found = f"step {step}: this iterator was made before the process forked, and its threads run only in the parent"
    raise PipelineError(f"{found}. Make another iterator with pipeline.iter(start_step={step}).")


def _forked() -> None:
    """In a forked child, disable the readers. `get` would wait forever, and `close` would end the parent's workers."""
    for reader in list(_open_readers):
        reader.results, reader.close, reader.get = {}, lambda: None, _refuse  # type: ignore[method-assign]
    _open_readers.clear()


os.register_at_fork(after_in_child=_forked)


@atexit.register
def _end() -> None:
    """End all threads before the interpreter ends. Otherwise the interpreter would stop them in the middle of native code."""
    deadline, readers = time.monotonic() + _ENDS_IN, list(_open_readers)
    for reader in readers:
        reader.close()
    for thread in [thread for reader in readers for thread in reader.threads if thread.ident is not None]:
        thread.join(max(0.0, deadline - time.monotonic()))
