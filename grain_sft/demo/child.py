"""Child: a training process as its parent sees it."""

from __future__ import annotations

import collections
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import grain_sft
from grain_sft.demo import log
from grain_sft.demo.log import Record
from grain_sft.demo.train import RunOptions
from grain_sft.errors import GrainSftError
from grain_sft.storage import without_interrupts

_LAST_LINES = 20  # of stderr, kept for a message
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # an accelerator may be in use, and is not needed
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # on CPUs some jaxlibs crash on the code that they kept
}


class Child:
    """A process that runs `grain_sft.demo.train`. It does not outlive the `with` block.

    Args:
      name: of the run, for messages.
      options: of the run.
    """

    def __init__(self, name: str, options: RunOptions) -> None:
        self.name = name
        with without_interrupts():
            self._process = subprocess.Popen(
                [*_python(), "-m", "grain_sft.demo.train", *options.to_arguments()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, **_ENVIRONMENT},
                encoding="utf-8",
                errors="replace",
            )
        self._stderr: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def records(self) -> Iterator[Record]:
        """Records of the steps as the process reports them, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            record = log.parse(line)
            if record is not None:
                yield record

    def kill(self) -> bool:
        """End the process with SIGKILL, which it can neither catch nor prepare for; whether it was that which ended it."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL

    def finish(self) -> None:
        """Wait for the process to end by itself.

        Raises:
          GrainSftError: it failed; with the last that it said.
        """
        status = self._process.wait()
        self._reader.join()
        if status == 0:
            return
        said = next((line for line in reversed(self._stderr) if line.strip()), "it said nothing.").strip()
        how = f"exit status {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        if status == -signal.SIGKILL:
            said = "most likely the machine ran out of memory, of which a run takes about 1 GB."
        raise GrainSftError(f"the {self.name} run ended with {how}: {said}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdout, self._process.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _drain(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._stderr.append(line)


def _python() -> list[str]:
    """This Python; what lies in the working directory is no module to it, unless that is where grain_sft lies."""
    beside = Path(grain_sft.__file__).resolve().parents[1]
    return [sys.executable] if beside == Path.cwd() else [sys.executable, "-P"]
