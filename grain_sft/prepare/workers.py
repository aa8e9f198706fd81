"""Worker processes that render the units of a job: one line of JSON in and one out for each unit.

Not multiprocessing: such a process runs whatever the caller's main module is, and ends when its input does, which is when
its parent ends in whatever way.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec

from grain_sft import errors
from grain_sft.errors import GrainSftError, PrepareError
from grain_sft.prepare.chunks import Chunks
from grain_sft.prepare.job import Job
from grain_sft.prepare.records.inputs import Unit
from grain_sft.prepare.render import Renderer, Work


class _Start(msgspec.Struct):
    """First line to a worker."""

    work: Work
    chunks: str


class _Task(msgspec.Struct):
    """Line to a worker: a unit, and the number of its first record."""

    unit: Unit
    first: int


class _Reply(msgspec.Struct):
    """Line from a worker: the name of an error in `grain_sft.errors`, and its message; "" where the chunk was made."""

    error: str = ""
    message: str = ""


def render_all(job: Job, units: Sequence[Unit], workers: int) -> Iterator[Unit]:
    """Render `units` in this process, or in `workers` others; yield each when it is done.

    Raises:
      RecordError: First bad record in the order of the inputs, whatever the number of workers.
      PrepareError: A worker ended.
    """
    if workers <= 1 or len(units) <= 1:
        renderer = Renderer(job.work)
        for unit in units:
            job.render(unit, renderer)
            yield unit
        return
    with _Pool(job, min(workers, len(units))) as pool:
        yield from pool.run(units)


class _Pool:
    def __init__(self, job: Job, workers: int) -> None:
        self._job = job
        self._size = workers
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Pool:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [
            sys.executable,
            "-P",
            "-c",
            "from grain_sft.prepare import workers; workers.serve()",
        ]  # -m would warn
        try:
            for _ in range(self._size):
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,  # Ctrl-C is for this process, which ends them
                )
                self._processes.append(process)
                self._send(process, _Start(self._job.work, self._job.target.chunks))
                self._idle.put(process)
        except OSError as error:
            self.__exit__()
            raise PrepareError(f"no worker process could be started ({error}). Use --workers 1.") from error
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    def run(self, units: Sequence[Unit]) -> Iterator[Unit]:
        """Hand out the units in order; none after an error."""
        failed: dict[int, GrainSftError] = {}
        waiting = iter(units)
        with concurrent.futures.ThreadPoolExecutor(self._size) as threads:
            try:
                running: dict[concurrent.futures.Future[None], Unit] = {}
                while True:
                    while len(running) < self._size and not failed and (unit := next(waiting, None)) is not None:
                        running[threads.submit(self._render, unit)] = unit
                    if not running:
                        break
                    done, _ = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
                    for future in done:
                        unit = running.pop(future)
                        error = future.exception()
                        if error is None:
                            yield unit
                        elif isinstance(error, GrainSftError):
                            failed[unit.number] = error
                        else:
                            raise error
            except BaseException:  # Ctrl-C: units that are being rendered are not waited for
                for process in self._processes:
                    process.kill()
                raise
        if failed:
            raise failed[min(failed)]

    def _render(self, unit: Unit) -> None:
        process = self._idle.get()
        try:
            self._send(process, _Task(unit, self._job.firsts[unit.number]))
            line = process.stdout.readline() if process.stdout else b""
        except OSError:
            line = b""
        if not line:
            process.wait()
            path = self._job.work.inputs[unit.input].path
            raise PrepareError(
                f"a worker process ended ({process.returncode}) at {path}, unit {unit.number}. Out of memory? "
                "Start again to continue from there, with fewer --workers."
            )
        self._idle.put(process)
        reply = msgspec.json.decode(line, type=_Reply)
        if reply.error:
            raise error_named(reply.error, reply.message)

    def _send(self, process: subprocess.Popen[bytes], line: _Start | _Task) -> None:
        if process.stdin is None:
            raise OSError("no input")
        process.stdin.write(msgspec.json.encode(line) + b"\n")
        process.stdin.flush()


def error_named(name: str, message: str) -> GrainSftError:
    """Return the error of a class in `grain_sft.errors`, which was raised in another process."""
    kind = getattr(errors, name, PrepareError)
    made: GrainSftError = kind(message)
    return made


def serve() -> None:
    """Render units until the input ends, in a process of its own."""
    try:
        _serve()
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(130)


def _serve() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's prints are not replies
    parent = os.getppid()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Start)
    chunks = Chunks(start.chunks, start.work.key)
    renderer = Renderer(start.work)
    for line in sys.stdin.buffer:
        task = msgspec.json.decode(line, type=_Task)
        reply = _Reply()
        try:
            made = renderer.chunk(task.unit, task.first)
            if os.getppid() != parent:
                return  # killed; another run may have begun
            chunks.write(task.unit.number, made)
        except GrainSftError as error:
            reply = _Reply(type(error).__name__, str(error))
        except MemoryError:
            reply = _Reply("PrepareError", "a worker has run out of memory. Use fewer workers.")
        replies.write(msgspec.json.encode(reply) + b"\n")
        replies.flush()
