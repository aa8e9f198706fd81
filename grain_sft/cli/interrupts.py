"""Ctrl-C in a process that runs one command: it ends within two seconds, with one line on stderr and exit status 130.

The signal handler ends the process at once: it kills the children, runs the `atexit` functions and raises nothing, as an
exception in an import can crash extension modules. Another thread does this if the main one is in native code."""

import _thread
import atexit
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

NATIVE = 0.4  # seconds that the main thread gets to leave native code
LEAVE = 1.0  # seconds for child processes and `atexit` functions
STATUS = 130


class Guard:
    """The response of this process to Ctrl-C.

    Args:
      name: Name of the program, for the line on stderr.
      ends_process: Whether the process exits right after the command, with the status of the command.
    """

    def __init__(self, name: str, *, ends_process: bool = False) -> None:
        self.name, self._ends_process = name, ends_process
        self._status, self._pid = 0, os.getpid()
        self._announcing, self._leaving = _thread.allocate_lock(), _thread.allocate_lock()

    def run(self, command: Callable[[], int]) -> int:
        """Return the exit status of `command`; on Ctrl-C end the process instead."""
        self._install()
        try:
            self._status = command()
        except BaseException as error:
            status = error.code if isinstance(error, SystemExit) else 1
            self._status = status if isinstance(status, int) else int(status is not None)
            raise
        return self._status

    def _install(self) -> None:
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            return  # ignored, as in a shell's background jobs
        read, write = os.pipe()
        os.set_blocking(write, False)
        try:
            signal.set_wakeup_fd(write, warn_on_full_buffer=False)
            signal.signal(signal.SIGINT, self._handle)
            # multiprocessing's resource tracker frees what killed processes shared, and would warn of that
            sys.warnoptions.append("ignore:resource_tracker")
            if self._ends_process:
                atexit.register(self._end)  # the first to be registered is the last to run
            # a signal to a forked child would be written to the pipe of this process
            os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
            _thread.start_new_thread(self._watch, (read,))
        except ValueError:  # not the main thread, the only one that can handle signals
            os.close(read)
            os.close(write)

    def _end(self) -> None:
        """End the process with its status, without the slow shutdown of the interpreter."""
        if os.getpid() != self._pid:  # a forked child
            return
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # it is None, full or closed
                self._status = self._status or 120  # the interpreter's own status if it can't flush
        os._exit(self._status)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._leave()

    def _watch(self, read: int) -> None:
        while signal.SIGINT not in os.read(read, 1):
            pass
        self._announce()
        time.sleep(NATIVE)
        _thread.start_new_thread(self._leave, ())
        time.sleep(LEAVE)
        os._exit(STATUS)

    def _leave(self) -> None:
        """End the process with status 130, unless another thread does."""
        if self._leaving.acquire(False):
            self._status = STATUS
            self._announce()
            _kill_children()
            atexit._run_exitfuncs()
            os._exit(STATUS)

    def _announce(self) -> None:
        """Write the one line, and silence stderr: tracebacks and the warnings of libraries."""
        if not self._announcing.acquire(False):
            return
        try:
            start = "\n" if os.isatty(2) else ""  # after a line of progress
            os.write(2, f"{start}{self.name}: interrupted.\n".encode())
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        except OSError:  # stderr is closed
            pass


def _kill_children() -> None:
    """Kill all processes below this one but multiprocessing's resource tracker, which frees what they shared."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            fields = _read_proc(name, "stat").rpartition(b")")[2].split()
            parents[int(name)] = int(fields[1]) if len(fields) > 1 else 0
    for pid in parents:
        ancestor = parents[pid]
        while ancestor and ancestor != os.getpid():
            ancestor = parents.get(ancestor, 0)
        if ancestor and pid != os.getpid() and b"multiprocessing.resource_tracker" not in _read_proc(pid, "cmdline"):
            try:
                os.kill(pid, signal.SIGKILL)
            except OSError:  # it has ended
                continue


def _read_proc(pid: int | str, name: str) -> bytes:
    """Return a file of /proc/PID, or nothing where the process has ended."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""
