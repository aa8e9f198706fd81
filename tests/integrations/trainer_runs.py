"""Runs of real trainers in processes of their own, which may be killed, and the losses that they print."""

import os
import re
import signal
import subprocess
import sys

PRINT_LOSSES = """
from tunix.sft.peft_trainer import PeftTrainer

buffer_metrics = PeftTrainer._buffer_metrics

def printing(self, buffer, loss, step, *arguments, **more):
    print("LOSS", self._mode.name, step, float(loss).hex(), flush=True)
    return buffer_metrics(self, buffer, loss, step, *arguments, **more)

PeftTrainer._buffer_metrics = printing
"""
"""Program text: each loss of Tunix is printed when it is computed, before the checkpoint of its step is written."""

_LOSS = re.compile(r"^LOSS (\w+) (\d+) (\S+)$", re.MULTILINE)


def run(program, arguments, *, kill_at=None, pause=0.0, fails=False, cache=None, environment=None):
    """Run a program, killed `pause` seconds after the loss of step `kill_at`; return what it printed.

    `cache` is a folder for JAX's compiled functions."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        output = ""
        for line in process.stdout:
            output += line
            if kill_at is not None and line.startswith(f"LOSS TRAIN {kill_at} "):
                try:
                    process.wait(pause)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                break
        output += process.stdout.read()
    assert kill_at is not None or (process.returncode != 0) == fails, output[-5000:]
    return output


def losses(*outputs):
    """Losses by kind, step (from 0) and number among those of the step. Those that were computed twice are equal."""
    found = {}
    for output in outputs:
        seen = {}
        for kind, step, loss in _LOSS.findall(output):
            number = seen[kind, step] = seen.get((kind, step), -1) + 1
            assert found.setdefault((kind, int(step), number), loss) == loss, (kind, step, number)
    return found
