"""Run Python in a process of its own."""

import os
import subprocess
import sys


def run_python(*words: object, cwd: object = None, timeout: float = 400, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments and environment variables. It must end with status 0. Return what it printed."""
    options = {"capture_output": True, "text": True, "cwd": cwd, "timeout": timeout, "env": {**os.environ, **variables}}
    done = subprocess.run([sys.executable, *map(str, words)], **options)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done
