"""A training process as its parent sees it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grain_sft
from grain_sft.demo import records
from grain_sft.demo.records import Record
from grain_sft.errors import GrainSftError
from grain_sft.storage import without_interrupts

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # an accelerator may be in use, and is not needed
    "JAX_ENABLE_COMPILATION_CACHE": "false",  # on CPUs some jaxlibs crash on the code that they kept
}


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """One run."""

    config: str  # path of the pipeline's config
    folder: str  # of its log and its checkpoints
    vocab_size: int
    steps: int  # of the whole training
    checkpoint_every: int  # steps from one checkpoint to the next
    seed: int  # of the parameters
    resume: str | None = None  # folder of the checkpoints whose newest the run continues from; None begins at step 0

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return Path(self.folder, "checkpoints")


class Child:
    """A process that runs `grain_sft.demo.train`. It does not outlive the `with` block."""

    def __init__(self, name: str, options: RunOptions) -> None:
        self._name = name
        self._log = Path(options.folder, "log.jsonl")
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        with without_interrupts():
            self._process = subprocess.Popen(
                [*_python(), "-m", "grain_sft.demo.train", json.dumps(dataclasses.asdict(options))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **_ENVIRONMENT},
                encoding="utf-8",
                errors="replace",
            )
        self.pid = self._process.pid

    def records(self) -> Iterator[Record]:
        """Yield the records of the steps as the process prints them, until it ends, and write them to log.jsonl."""
        with open(self._log, "w", buffering=1, encoding="utf-8") as log:
            for line in self._process.stdout or ():
                record = records.parse(line)
                if record is not None:
                    log.write(line)
                    yield record

    def kill(self) -> bool:
        """End the process with SIGKILL, which it cannot catch, and return whether that ended it."""
        self._process.kill()
        return self._process.wait() == -signal.SIGKILL

    def finish(self) -> None:
        """Wait for the process to end by itself; an error has its last line."""
        status = self._process.wait()
        if status == 0:
            return
        self._errors.seek(0)
        last = (self._errors.read().strip() or "it printed nothing.").splitlines()[-1].strip()
        if status == -signal.SIGKILL:
            last = "most likely the machine ran out of memory. A run takes about 1 GB."
        how = f"exit status {status}" if status > 0 else f"signal {-status} ({signal.Signals(-status).name})"
        raise GrainSftError(f"the {self._name} run ended with {how}: {last}")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def _python() -> list[str]:
    """Return the command of this Python, without modules of the working directory unless grain_sft is there."""
    parent = Path(grain_sft.__file__).resolve().parents[1]
    return [sys.executable] if parent == Path.cwd() else [sys.executable, "-P"]
