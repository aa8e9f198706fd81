"""Start and end of Grain's worker processes, in any program, such as a script or a notebook."""

import _thread
import atexit
import contextlib
import multiprocessing
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker, util
from typing import Any

from absl import flags

from grain_sft.storage import ForkSafeLock, without_interrupts

_lock = ForkSafeLock()  # held while `_startable` changes the module `__main__`

_CLOSES_IN = 10.0  # most seconds that `stop` waits for the workers to end, and `check` for Grain to report a dead worker
_WAITS_FOR_PARENT = "grain_sft-parent"  # name of the thread of `end_with_parent`
# Grain's module for worker processes. It has a flag that is True in such a process.
_PREFETCH = "grain._src.python.dataset.transformations.process_prefetch"


def start(iterator: Any) -> Any:
    """Start all worker processes of a Grain iterator now, and return the iterator that owns them, for `stop`.

    Grain itself starts each process at the first read from it. The processes do not get Ctrl-C.
    """
    resource_tracker.ensure_running()  # before SIGINT is blocked, because the tracker's start unblocks it
    with _startable(), without_interrupts():
        iterator.get_state()  # makes Grain create the iterators that own the processes
        inner = getattr(iterator, "_iterator", iterator)  # the iterator of a `grain.DataLoader` wraps the one with the workers
        for each in _tree(inner):
            each.start_prefetch()
    return inner


class InOrder:
    """Reader of a dataset that ends in `mp_prefetch`: it returns the elements in order, from step `start` on.

    The first call of `next` starts the workers. All calls of `next` come from one thread, but not from the main thread, where
    Ctrl-C could interrupt the start.

    Attributes:
      iterator: Grain's iterator; None before the workers are started.
      started: Whether the workers have started, or have failed to start.
    """

    def __init__(self, dataset: Any, start: int) -> None:
        self._dataset, self.start = dataset, start
        self._stop: Callable[[], object] | None = None
        self._closed = False
        self._dead_since = 0.0  # time at which `check` first found a dead worker; 0 if it found none
        self.iterator: Any = None
        self.started = False

    def next(self, step: int) -> Any:
        """Return the element of `step`. Callers pass consecutive steps from `start` on."""
        if self.iterator is None:
            try:
                iterator = self._dataset.__iter__()
                self._stop = stop_with(self, iterator)
                try:
                    start(iterator)
                finally:
                    self.iterator = iterator  # also if a worker fails to start: `close` ends the others
            finally:
                self.started = True
            if self._closed:  # `close` was called during the start
                self.close()
        return next(self.iterator)

    def check(self) -> None:
        """Raise a RuntimeError if a worker has been dead for 10 s. A thread that waits for `next` calls this.

        Grain raises earlier, unless the worker was killed while it held a lock. Then Grain waits forever.
        """
        # the exit code is None while a worker runs, and 0 if it ended as it should
        dead = None if self.iterator is None else next((each for each in processes(self.iterator) if each.exitcode), None)
        if dead is None:
            self._dead_since = 0.0
        elif not self._dead_since:
            self._dead_since = time.monotonic()
        elif time.monotonic() - self._dead_since > _CLOSES_IN:
            raise RuntimeError(f"Worker process was terminated with exit code {dead.exitcode} while it held a lock of Grain.")

    def close(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """End the workers, once. Do nothing while the interpreter ends: the exit function of `stop_with` has ended them."""
        # `is_ending` is a default argument, because Python may clear the name `sys` before it ends.
        self._closed = True
        if self.iterator is not None and self._stop is not None and not is_ending():
            self._stop()


def stop_with(owner: object, iterator: Any) -> Callable[[], object]:
    """Return a function that stops a Grain iterator once. It also runs when `owner` is collected or the interpreter exits."""
    once = weakref.finalize(owner, stop, iterator)
    # At exit, `multiprocessing` ends the workers, and an iterator that still reads from them would print a traceback. So `once`
    # has to run first. Python runs the function first that was registered last, so `once` is registered again here.
    atexit.register(once)
    return once


def stop(iterator: Any) -> None:
    """Close a Grain iterator. A thread that waits for the iterator's next element gets an error.

    Grain would wait forever for a lock that a killed worker held. So `stop` kills the workers that do not end within 10 s.
    """
    iterator = getattr(iterator, "_iterator", iterator)
    tree, running = list(_tree(iterator)), processes(iterator)
    closed = threading.Lock()  # released when the iterator is closed
    closed.acquire()

    def run() -> None:
        try:
            _close(iterator, tree)
        finally:
            closed.release()

    thread = threading.Thread(target=run, name="grain_sft-close", daemon=True)
    try:  # not `thread.start()`: Ctrl-C inside it could leave the thread's own lock held forever
        _thread.start_new_thread(thread.start, ())
        if not closed.acquire(timeout=_CLOSES_IN):
            for process in running:
                process.kill()
            _end_waits(tree)
            # at exit, Grain would close the iterators again, with priority 1, and wait forever for the lock of a killed worker
            util.Finalize(None, _ignore_closes, (tree,), exitpriority=2)
    except RuntimeError:  # no thread can be started, such as at exit: the wait has no limit
        _close(iterator, tree)
    # Grain would close these iterators again at exit, when its modules are gone, and print a traceback. The lists are replaced
    # and not cleared, because `_close` may still go through them.
    for each in tree:
        if hasattr(each, "_iterators_in_use"):
            each._iterators_in_use = []


def _ignore_closes(tree: Iterable[Any]) -> None:
    """Make the method `close` of Grain iterators do nothing."""
    for each in tree:
        each.close = lambda: None


def _close(iterator: Any, tree: Iterable[Any]) -> None:
    iterator.close()
    _end_waits(tree)  # `close` has emptied the queues: without a last element, threads would wait forever


def _end_waits(tree: Iterable[Any]) -> None:
    """Put an error into the queue of each iterator in `tree`, for the threads that wait for an element."""
    for each in tree:
        buffer = getattr(each, "_buffer", None)
        if isinstance(buffer, queue.Queue):
            with contextlib.suppress(queue.Full):  # no thread waits for an element of a full queue
                # Grain's prefetch thread puts tuples (element, state, error)
                buffer.put_nowait((None, None, ValueError("This iterator is closed.")))


def end_with_parent() -> None:
    """In a Grain worker process, end when the parent ends, instead of waiting forever for room in a queue."""
    parent = multiprocessing.parent_process()
    if parent is None or not in_worker():
        return
    if any(thread.name == _WAITS_FOR_PARENT for thread in threading.enumerate()):
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name=_WAITS_FOR_PARENT, daemon=True).start()


def in_worker() -> bool:
    """Return whether this is a Grain worker process."""
    return bool(getattr(sys.modules.get(_PREFETCH), "_is_in_worker_process", False))


def processes(iterator: Any) -> list[Any]:
    """Return the worker processes of a Grain iterator, in the order of their elements."""
    found = (getattr(each, "_prefetch_process", None) for each in _tree(iterator))
    return [process for process in found if process is not None]


def was_ended(error: BaseException) -> bool:
    """Return whether `error` is what Grain raises when a worker process was killed or died."""
    return isinstance(error, RuntimeError) and "process was terminated" in str(error)


def _tree(iterator: Any) -> Iterator[Any]:
    """Yield all iterators that a Grain iterator reads from, and then the iterator itself."""
    for parent in (*getattr(iterator, "_parents", ()), *getattr(iterator, "_iterators_in_use", ())):
        if parent is not None:
            yield from _tree(parent)
    yield iterator


@contextlib.contextmanager
def _startable() -> Iterator[None]:
    """Let Grain start worker processes in the context.

    Workers would run the main script again, and fail if the script has no `if __name__ == "__main__"` guard. So the script is
    hidden. Workers do not need the script: cloudpickle sends them all that they run, including classes of the script.
    """
    with _lock.lock:
        default_grain_flags()
        main = vars(sys.modules["__main__"])
        names = ["__spec__", "__file__"]  # where multiprocessing.spawn looks
        hidden = {name: main[name] for name in names if name in main}
        try:
            main["__spec__"] = None
            main.pop("__file__", None)
            yield
        finally:
            main.update(hidden)


def default_grain_flags() -> None:
    """Make Grain's absl flags readable, with their defaults, if absl has not parsed the command line."""
    if flags.FLAGS.is_parsed():
        return
    for module, defined in flags.FLAGS.flags_by_module_dict().items():
        if module.split(".")[0] == "grain":
            for flag in defined:
                flag.present = max(flag.present, 1)  # absl lets programs read a flag that is present
