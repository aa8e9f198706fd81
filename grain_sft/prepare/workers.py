"""`Runner`, which runs the steps of a preparation on this machine, and its worker processes, which render records.

A worker reads lines from its standard input. The first line is a job as JSON. Each other line is the number of a group of units
to render. The worker exits when its standard input ends. The input also ends if the parent is killed. Workers do not use
`multiprocessing`, because it would run the caller's main module again.
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
from grain_sft.storage import in_threads

_MIN_GROUPS_PER_WORKER = 4  # rendering fewer groups is faster than starting a worker


class Failure(msgspec.Struct, frozen=True):
    """A `GrainSftError` that another process raised: the name of its class, and its message."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: GrainSftError) -> Self:
        return cls(type(error).__name__, str(error))

    def to_error(self) -> GrainSftError:
        # a class that is not in errors.py becomes a PrepareError
        kind: type[GrainSftError] = getattr(errors, self.kind, PrepareError)
        return kind(self.message)


@dataclasses.dataclass(frozen=True)
class Runner:
    """Runner that scans in threads, renders in worker processes, and writes in this process.

    Each method yields its items (units, groups or tasks) in order, each as soon as its work is done.

    Attributes:
      workers: Number of processes that render; None for one per core, or fewer for few groups.
    """

    workers: int | None

    def scan(self, entries: Sequence[Input], units: Sequence[Unit]) -> Iterable[Unit]:
        """Count the records of each unit, and hash its bytes."""
        return in_threads(lambda unit: inputs.scan_unit(entries[unit.input], unit), units, threads=inputs.SCAN_THREADS)

    def render(self, job: Job, groups: Sequence[int]) -> Iterable[int]:
        """Render each group to a chunk file. If one process is enough, this process renders all groups."""
        max_useful = -(-len(groups) // _MIN_GROUPS_PER_WORKER)
        num_workers = min(len(groups), self.workers or min(os.cpu_count() or 1, max_useful))
        if num_workers > 1:
            yield from _render_by_workers(job, groups, num_workers)
        else:
            for group in groups:
                job.chunks.write(group, job.chunk(job.groups[group]))
                yield group

    def write(self, job: Job, plan: Plan, tasks: Sequence[Task]) -> Iterable[Task]:
        return write_tasks(plan, tasks)


def _render_by_workers(job: Job, groups: Sequence[int], num_workers: int) -> Iterator[int]:
    """Render groups in worker processes. Each thread of a pool has its own worker process, and sends it group after group."""
    thread = threading.local()

    def render(group: int) -> int:
        """Let this thread's process render a group. The first call in a thread takes one of the `idle_processes`."""
        if not hasattr(thread, "process"):
            thread.process = idle_processes.pop()
            _send(thread.process, msgspec.json.encode(job))
        _send(thread.process, b"%d" % group)
        line = thread.process.stdout.readline()
        if not line:
            units, status = job.groups[group], thread.process.wait()
            begin = f"{job.inputs[units[0].input].path}:{units[0].first}"
            end = f"{job.inputs[units[-1].input].path}:{units[-1].first + units[-1].records - 1}"
            hint = "Its own error is on stderr. Fix the cause, then start again to continue from there."
            if status < 0:  # ended by a signal
                hint = "Out of memory? Start again to continue from there, with fewer --workers."
            raise PrepareError(f"a worker process ended ({status}) in the records {begin} to {end}. {hint}")
        if failure := msgspec.json.decode(line, type=Failure | None):
            raise failure.to_error()
        return group

    # The processes are killed before the pool is closed. Closing waits for threads, and a thread may wait for its process.
    with concurrent.futures.ThreadPoolExecutor(num_workers) as threads, contextlib.ExitStack() as processes:
        try:
            idle_processes = [processes.enter_context(_worker_process()) for _ in range(num_workers)]
        except OSError as error:
            raise PrepareError(f"no worker process could be started ({error}). Use --workers 1.") from error
        yield from threads.map(render, groups)


@contextlib.contextmanager
def _worker_process() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        # With -P, Python imports no module of the current folder. With -m, it would warn that the package has imported this
        # module already.
        [sys.executable, "-P", "-c", "from grain_sft.prepare import workers; workers.serve()"],
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C then reaches only the parent, which kills the workers
    )
    try:
        yield process
    finally:
        process.kill()
        # `communicate` fails if the buffer of stdin still has a line that `_send` failed to send
        with contextlib.suppress(OSError):
            process.communicate()


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Send a line to a process. If the process has ended, do nothing: the caller will read an empty reply."""
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def serve() -> None:
    """Render groups in a worker process. Reply to each group with a line: `null` or a `Failure`."""
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        replies = os.fdopen(os.dup(1), "wb")  # the pipe to the parent, which is still stdout
        os.dup2(2, 1)  # stdout becomes stderr, so text that a library prints does not mix with the replies
        parent = os.getppid()
        job = msgspec.json.decode(sys.stdin.buffer.readline(), type=Job)
        for line in sys.stdin.buffer:
            group = int(line)
            failure = None
            try:
                chunk = job.chunk(job.groups[group])
                if os.getppid() != parent:
                    return  # the parent was killed, and another run may write the same chunks
                job.chunks.write(group, chunk)
            except GrainSftError as error:
                failure = Failure.of(error)
            except MemoryError:
                failure = Failure("PrepareError", "a worker ran out of memory. Start again with fewer --workers.")
            replies.write(msgspec.json.encode(failure) + b"\n")
            replies.flush()
