"""The runner of this machine, and the worker processes that render units for it.

A worker reads lines from its standard input: first a job as JSON, then the number of each group of units to render. It exits
when its input ends, so also when its parent is killed. Workers are not `multiprocessing` processes, because these run the
caller's main module.
"""

import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import msgspec

from grain_sft import errors
from grain_sft.child_environment import child_environment
from grain_sft.errors import GrainSftError, PrepareError
from grain_sft.prepare.job import Job, write_tasks
from grain_sft.prepare.records import inputs
from grain_sft.prepare.records.units import Input, Unit
from grain_sft.prepare.writers import Plan, Task

_MIN_GROUPS_PER_WORKER = 4  # rendering fewer takes less time than starting a worker


class Failure(msgspec.Struct, frozen=True):
    """A `GrainSftError` that another process raised."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: GrainSftError) -> Self:
        return cls(type(error).__name__, str(error))

    def to_error(self) -> GrainSftError:
        kind: type[GrainSftError] = getattr(errors, self.kind, PrepareError)
        return kind(self.message)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runner of a job's steps on this machine. It scans in threads, renders in processes, and writes in this process.

    Each method yields its steps in order, each after it is done. The first step that failed raises its error instead.

    Attributes:
      workers: Number of processes that render. None means one per core, or fewer for few groups.
    """

    workers: int | None

    def scan(self, entries: Sequence[Input], units: Sequence[Unit]) -> Iterable[Unit]:
        """Count the records of every unit, and hash its bytes."""
        with concurrent.futures.ThreadPoolExecutor(inputs.SCAN_THREADS) as pool:
            yield from pool.map(lambda unit: inputs.scan_unit(entries[unit.input], unit), units)

    def render(self, job: Job, groups: Sequence[int]) -> Iterable[int]:
        """Render groups of units, given by number, to their chunks."""
        enough = -(-len(groups) // _MIN_GROUPS_PER_WORKER)
        size = min(len(groups), self.workers or min(os.cpu_count() or 1, enough))
        if size > 1:
            yield from _render_by_workers(job, groups, size)
        else:
            for group in groups:
                job.chunks.write(group, job.chunk(job.groups[group]))
                yield group

    def write(self, job: Job, plan: Plan, tasks: Sequence[Task]) -> Iterable[Task]:
        """Write the parts of the corpus, which `tasks` describe."""
        return write_tasks(plan, tasks)


def _render_by_workers(job: Job, groups: Sequence[int], size: int) -> Iterator[int]:
    thread = threading.local()

    def render(group: int) -> int:
        if not hasattr(thread, "process"):
            thread.process = waiting.pop()
            _send(thread.process, msgspec.json.encode(job))
        _send(thread.process, b"%d" % group)
        if not (line := thread.process.stdout.readline()):
            unit, status = job.groups[group][0], thread.process.wait()
            path = job.inputs[unit.input].path
            if status < 0:  # ended by a signal
                raise PrepareError(
                    f"a worker process ended ({status}) at {path}, line {unit.first} or after it. Out of memory? Start again "
                    "to continue from there, with fewer --workers."
                )
            raise PrepareError(
                f"a worker process ended ({status}) at {path}, line {unit.first} or after it. Its own error is on stderr. "
                "Fix that, then start again to continue from there."
            )
        if failure := msgspec.json.decode(line, type=Failure | None):
            raise failure.to_error()
        return group

    # the stack is left first: it ends the processes, so that no thread that is joined waits for one, also at Ctrl-C
    with concurrent.futures.ThreadPoolExecutor(size) as threads, contextlib.ExitStack() as processes:
        try:
            waiting = [processes.enter_context(_started()) for _ in range(size)]
        except OSError as error:
            raise PrepareError(f"no worker process could be started ({error}). Use --workers 1.") from error
        yield from threads.map(render, groups)


@contextlib.contextmanager
def _started() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        # with -m, Python would warn that the package has imported the module already
        [sys.executable, "-P", "-c", "from grain_sft.prepare import workers; workers.serve()"],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C reaches this process alone, which ends the workers
    )
    try:
        yield process
    finally:
        process.kill()
        with contextlib.suppress(OSError):  # raised for input that was not sent
            process.communicate()


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Write a line. If the process has ended, do nothing: the caller then reads no reply."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def serve() -> None:
    """Render groups of units until the input ends, in a process of its own; reply `null` or a failure for each."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        replies = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)  # what libraries print goes to stderr, not between the replies
        parent = os.getppid()
        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
        for line in sys.stdin.buffer:
            group = int(line)
            failure = None
            try:
                made = job.chunk(job.groups[group])
                if os.getppid() != parent:
                    return  # the parent was killed, and another run may write the same chunks
                job.chunks.write(group, made)
            except GrainSftError as error:
                failure = Failure.of(error)
            except MemoryError:
                failure = Failure("PrepareError", "a worker ran out of memory. Start again with fewer --workers.")
            replies.write(msgspec.json.encode(failure) + b"\n")
            replies.flush()
