"""Child processes that run Python."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from grain_sft.errors import PipelineError

_MOST_SECONDS = 3600


def child_environment() -> dict[str, str]:
    """Return the environment for a child process that imports the same modules as this process."""
    # In `sys.path`, "" means the working directory, as in notebooks. Python ignores entries that are not texts, such as a Path.
    paths = (path or os.getcwd() for path in sys.path if isinstance(path, str))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}


def run_python(what: str, *arguments: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Run Python in a child process, and return the JSON object in the last line that the process prints.

    Args:
      what: Name of the process for messages, such as "a process of the benchmark".
      arguments: Arguments of Python, such as "-m" and the name of a module.
      environment: All environment variables of the process.

    Raises:
      PipelineError: The process fails, or runs for more than an hour.
    """
    command = [sys.executable, *arguments]
    try:
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_MOST_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise PipelineError(f"{what} was ended after {_MOST_SECONDS} s. Try a smaller run.") from error
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2]
        raise PipelineError(f"{what} ended with status {result.returncode}: {reason}")
    figures: dict[str, Any] = json.loads(result.stdout.strip().rpartition("\n")[2])
    return figures
