"""Ctrl-C ends a process that runs a command: within two seconds, with one line on stderr and exit status 130.

The signal handler kills the child processes, runs the `atexit` functions, and ends the process. It raises no exception,
because an exception could crash an extension module that is being imported. Python calls the handler only while the main thread
runs Python code. If this thread stays in native code for longer than `NATIVE` seconds, a second thread ends the process.
Native code that holds the GIL, such as `sum` of a long iterator, delays both threads.
"""

import _thread
import atexit
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

NATIVE = 0.4  # seconds from the signal until the second thread ends the process
LEAVE = 1.0  # seconds after `NATIVE` until the process ends, even if `atexit` functions still run
INTERRUPTED = 130  # exit status after Ctrl-C


class Guard:
    """Response of the program `name` to Ctrl-C. If `exits`, the process ends without the slow shutdown of Python."""

    def __init__(self, name: str, *, exits: bool = False) -> None:
        self.name, self._exits = name, exits
        self._status, self._pid = 0, os.getpid()
        # These locks are never released. So only one thread writes "interrupted.", and only one ends the process.
        self._announcing, self._leaving = _thread.allocate_lock(), _thread.allocate_lock()

    def run(self, command: Callable[[], int]) -> int:
        """Call `command` and return its exit status. On Ctrl-C, end the process instead."""
        self._install()
        try:
            self._status = command()
        except BaseException as error:
            status = error.code if isinstance(error, SystemExit) else 1
            # the code of a SystemExit: a status, None for 0, or a message for 1
            self._status = status if isinstance(status, int) else int(status is not None)
            raise
        return self._status

    def _install(self) -> None:
        """Install the signal handler, and start the second thread.

        Do nothing outside the main thread, or if SIGINT is ignored or already has a handler.
        """
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return  # SIGINT is ignored, as in a background job of a shell, or has another handler
        try:
            signal.signal(signal.SIGINT, self._handle)
        except ValueError:  # not the main thread
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        # The option is for multiprocessing's resource tracker, a child process. Without it, the tracker would warn about shared
        # memory that killed processes have left.
        sys.warnoptions.append("ignore:resource_tracker")
        if self._exits:
            atexit.register(self._end)  # it is registered first, so it runs last
        # a forked child has the same pipe, and must not write its own signals to it
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        _thread.start_new_thread(self._watch, (read,))

    def _end(self) -> None:
        """End the process with the status of the command, without the slow shutdown of the interpreter."""
        if os.getpid() != self._pid:  # a forked child
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # the stream is None, its disk is full, or it is closed
                self._status = self._status or 120  # the interpreter's own status if it can't flush
        os._exit(self._status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """End the process. In a forked child, do nothing."""
        if os.getpid() == self._pid:
            self._leave()
            time.sleep(LEAVE)  # `_leave` returns only if another thread is ending the process

    def _watch(self, read: int) -> None:
        """End the process if the signal handler does not end it in time. Runs in the second thread."""
        # Python writes signals to the pipe at once, also during native code
        while signal.SIGINT not in os.read(read, 1):
            pass
        self._announce()
        time.sleep(NATIVE)
        _thread.start_new_thread(self._leave, ())  # a third thread, because an `atexit` function in it may hang
        time.sleep(LEAVE)
        os._exit(INTERRUPTED)

    def _leave(self) -> None:
        """End the process, unless another thread is already ending it."""
        if self._leaving.acquire(False):
            self._status = INTERRUPTED
            self._announce()
            _kill_children()
            atexit._run_exitfuncs()
            os._exit(INTERRUPTED)

    def _announce(self) -> None:
        """Write "interrupted.", then send stderr to /dev/null, because tracebacks may follow."""
        if self._announcing.acquire(False):
            with contextlib.suppress(OSError):  # stderr is closed
                start = "\n" if os.isatty(2) else ""  # ends a line of progress
                os.write(2, f"{start}{self.name}: interrupted.\n".encode())
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _kill_children() -> None:
    """Kill all descendants of this process that /proc lists, except the resource tracker, which frees their shared memory."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            # `stat` has the id, the name in parentheses, the state and the parent's id. `fields` begins with the state.
            fields = _read_proc(name, "stat").rpartition(b")")[2].split()
            parents[int(name)] = int(fields[1]) if len(fields) > 1 else 0
    for pid in parents:
        ancestor = parents[pid]
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        if ancestor and b"multiprocessing.resource_tracker" not in _read_proc(pid, "cmdline"):
            with contextlib.suppress(OSError):  # the process has ended
                os.kill(pid, signal.SIGKILL)


def _read_proc(pid: int | str, name: str) -> bytes:
    """Return the content of a file in /proc/PID; b"" if the process has ended."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""
