"""Pool: worker processes that render the units of a job."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from grain_sft.errors import GrainSftError, PrepareError
from grain_sft.prepare.inputs import Unit
from grain_sft.prepare.job import Job
from grain_sft.prepare.work import Renderer
from grain_sft.prepare.worker import encode_work, error_of


def render_all(job: Job, units: Sequence[Unit], workers: int) -> Iterator[Unit]:
    """Render `units` in this process, or in `workers` others; yields each when it is done.

    Raises:
      RecordError: of the first bad record in the order of the inputs, whatever the number of workers.
      PrepareError: a worker ended.
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
        self._idle: queue.SimpleQueue[subprocess.Popen[str]] = queue.SimpleQueue()
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> _Pool:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-P", "-c", "from grain_sft.prepare import worker; worker.run()"]  # -m would warn
        line = encode_work(self._job.work, self._job.target.chunks) + "\n"
        try:
            for _ in range(self._size):
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    encoding="utf-8",
                    start_new_session=True,  # Ctrl-C is for this process, which ends them
                )
                self._processes.append(process)
                self._send(process, line)
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
        """Give the units out in order; after an error no more are given out."""
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
            except BaseException:  # Ctrl-C: what is being rendered is not waited for
                for process in self._processes:
                    process.kill()
                raise
        if failed:
            raise failed[min(failed)]

    def _render(self, unit: Unit) -> None:
        process = self._idle.get()
        request = {"unit": dataclasses.asdict(unit), "first": self._job.firsts[unit.number]}
        try:
            self._send(process, json.dumps(request) + "\n")
            line = process.stdout.readline() if process.stdout else ""
        except OSError:
            line = ""
        if not line:
            process.wait()
            path = self._job.work.inputs[unit.input].path
            raise PrepareError(
                f"a worker process ended ({process.returncode}) at {path}, unit {unit.number}. Out of memory? "
                "Start again to go on from there, with fewer --workers."
            )
        self._idle.put(process)
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise error_of(reply)

    def _send(self, process: subprocess.Popen[str], line: str) -> None:
        if process.stdin is None:
            raise OSError("no input")
        process.stdin.write(line)
        process.stdin.flush()
