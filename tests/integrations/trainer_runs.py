"""Helpers that run a real trainer in a process, kill it if a test wants that, and read the losses that it printed."""

import multiprocessing
import os
import re
import sys

import jax

PRINT_LOSSES = """
from tunix.sft.peft_trainer import PeftTrainer

buffer_metrics = PeftTrainer._buffer_metrics

def printing(self, buffer, loss, step, *arguments, **more):
    print("LOSS", self._mode.name, step, float(loss).hex(), flush=True)
    return buffer_metrics(self, buffer, loss, step, *arguments, **more)

PeftTrainer._buffer_metrics = printing
"""
"""Program text that makes Tunix print each loss when it is computed, before the checkpoint of its step is written."""

_LOSS = re.compile(r"^LOSS (\w+) (\d+) (\S+)$", re.MULTILINE)
_POST = ("sft.train_sft", "dpo.train_dpo", "distillation.train_distill")
_IMPORTS = ("orbax.checkpoint", "tunix.sft.peft_trainer", "maxtext.trainers.pre_train.train")
_IMPORTS += tuple(f"maxtext.trainers.post_train.{name}" for name in _POST)
"""Modules that the programs import. One process imports those that are installed, and each program runs in a fork of it."""


def _run(program, arguments, output, cache, environment):
    """Run a program in this process, as `python -c` does."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    os.environ.update(environment)
    sys.modules.pop("pytest", None)  # MaxText does not connect its processes if pytest is imported
    sys.argv = ["-c", *arguments]
    jax.config.update("jax_platforms", "cpu")
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    exec(program, {"__name__": "__main__"})


def run(program, arguments, *, kill_at=None, pause=0.0, fails=False, fork=True, cache=None, environment=None):
    """Run a Python program in a process of its own and return what it printed.

    Args:
      kill_at: Step after whose loss the process is killed; None to let it end.
      pause: Seconds between that loss and the kill.
      fails: Whether a process that is not killed is expected to fail.
      fork: Whether the process is a fork of one that has imported `_IMPORTS`.
      cache: Folder for JAX's compiled functions.
    """
    processes = multiprocessing.get_context("forkserver" if fork else "spawn")
    processes.set_forkserver_preload(list(_IMPORTS))
    ours, theirs = processes.Pipe(duplex=False)
    process = processes.Process(target=_run, args=(program, [*map(str, arguments)], theirs, cache, environment or {}))
    process.start()
    theirs.close()
    with ours, open(ours.fileno(), closefd=False) as printed:
        output = ""
        for line in printed:
            output += line
            if kill_at is not None and line.startswith(f"LOSS TRAIN {kill_at} "):
                process.join(pause)
                process.kill()
                break
        output += printed.read()
        process.join()
    assert kill_at is not None or (process.exitcode != 0) == fails, output[-5000:]
    return output


def losses(*outputs):
    """Return the losses in outputs of `run`, by (kind, step from 0, number within the step).

    A loss may be in two outputs, if its step was repeated after a restart. The two values must be equal.
    """
    found = {}
    for output in outputs:
        seen = {}
        for kind, step, loss in _LOSS.findall(output):
            number = seen[kind, step] = seen.get((kind, step), -1) + 1
            assert found.setdefault((kind, int(step), number), loss) == loss, (kind, step, number)
    return found
