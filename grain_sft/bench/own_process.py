"""Measuring in a process of its own, whose memory is nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from grain_sft.errors import PipelineError
from grain_sft.storage import CACHE_DIR_VARIABLE

_BEFORE = """
import json, os, sys, time
def memory():
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {key: int(fields[name].split()[0]) / 1e3 for key, name in (("mb", "VmRSS"), ("peak_mb", "VmHWM"))}
"""


def run(program: str, argument: str, cache: str) -> dict[str, Any]:
    """What a Python program prints, as JSON.

    Args:
      program: has `json`, `os`, `sys`, `time` and `memory()`, the megabytes that it holds and held at most; `argument` is its
        `sys.argv[1]`.
      cache: where it finds artefacts, and keeps them.

    Raises:
      PipelineError: it failed.
    """
    command = [sys.executable, "-c", _BEFORE + program, argument]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, CACHE_DIR_VARIABLE: cache})
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2]
        raise PipelineError(f"a process of the benchmark ended with status {result.returncode}: {reason}")
    figures: dict[str, Any] = json.loads(result.stdout.strip().rpartition("\n")[2])
    return figures
