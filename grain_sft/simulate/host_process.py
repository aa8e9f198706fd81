"""Program that runs some steps as one host of a run, and prints the figures of these steps as JSON."""

import contextlib
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from grain_sft.config import load
from grain_sft.pipeline import Observer, Run
from grain_sft.sampling import Host
from grain_sft.storage import activity

_COUNTS = {"requests": "remote_requests", "received": "remote_received_bytes", "local": "local_bytes"}
_DRAINS_IN = 600.0  # most seconds that the program waits for the batches that the threads read ahead


class _BatchTimes(Observer):
    """Observer that records the seconds that each batch took, by step, and sets `done` after `count` batches."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.done = threading.Event()
        self.seconds: dict[int, float] = {}

    def batch_made(self, pipeline: Run, step: int, seconds: float) -> None:
        self.seconds[step] = seconds
        if len(self.seconds) >= self._count:
            self.done.set()


def measure(config: Any, host: Host, steps: range, *, threads: int, prefetch: int, began: float) -> dict[str, Any]:
    """Run `steps` as one host, as fast as possible, and measure the process.

    The measurement includes the batches after `steps` that threads make ahead. The run has no audit log, and none of the
    config's observers.

    Args:
      config: Path of a config, or its content as a dict.
      threads, prefetch: As in `Pipeline.iter`, but at least 1.
      began: `time.time()` when the process was started.

    Returns:
      Figures by name.
        host: Index of the host.
        made: [first, stop] of the steps whose batches were made: [0, 12] for the steps 0 to 11.
        import_s, open_s, first_batch_s: Seconds of the imports, then until the pipeline was open, then until the first batch.
        delayed_s: Seconds of start-up that the process waited for a processor that other processes used.
        start_up_s: Seconds of start-up without `delayed_s`.
        batch_s: Seconds that a thread took to make each batch.
        open_cpu_s, cpu_s: Seconds of processor time until the pipeline was open, and after that.
        opening, reading: Requests, received bytes and local bytes until the pipeline was open, and after that.
        batch_bytes: Bytes of a batch, without the arrays that all batches share.
        opened_mb, peak_mb: Peak memory in MB until the pipeline was open, and until the end.
    """
    imported = time.time()
    pipeline = load(config, host=host).at(steps.start)
    opened = time.time()
    figures: dict[str, Any] = {"open_cpu_s": time.process_time(), "opening": _counts(), "opened_mb": _memory()}
    # When the last of `steps` is taken, the iterator has requested at least all batches before `end`: it requests more batches
    # only when at most half of those ahead are left.
    end = min(steps.stop + max(threads, prefetch) // 2 + 1, pipeline.sampler.end_of_batches)
    times = _BatchTimes(end - steps.start)
    pipeline.audit, pipeline.observers = None, (times,)
    iterator = pipeline.iter(start_step=steps.start, threads=threads, prefetch=prefetch)
    batch = next(iterator)
    first = time.time()
    delayed = _delayed()
    for _ in steps[1:]:
        batch = next(iterator)
    times.done.wait(_DRAINS_IN)
    iterator.close()
    for thread in threading.enumerate():
        if thread.name.startswith("grain_sft-read"):
            with contextlib.suppress(RuntimeError):  # the thread has not started yet
                thread.join(_DRAINS_IN)
    own_bytes = {id(array): array.nbytes for array in batch.values() if array.flags.writeable}  # others are shared
    return figures | {
        "host": host.index,
        "made": [steps.start, steps.start + len(times.seconds)],
        "import_s": imported - began,
        "open_s": opened - imported,
        "first_batch_s": first - opened,
        "start_up_s": first - began - delayed,
        "delayed_s": delayed,
        "batch_s": [times.seconds[step] for step in sorted(times.seconds)],
        "cpu_s": time.process_time() - figures["open_cpu_s"],
        "reading": {name: count - figures["opening"][name] for name, count in _counts().items()},
        "batch_bytes": sum(own_bytes.values()),
        "peak_mb": _memory(),
    }


def _counts() -> dict[str, int]:
    """Return the requests, received bytes and local bytes of this process so far, by name."""
    return {name: activity.counts[counter] for name, counter in _COUNTS.items()}


def _delayed() -> float:
    """Return the seconds for which this process waited for the processor; 0 if the system does not count them.

    The result is the wait of the main thread plus the longest wait of another thread. The other threads are assumed to wait at
    the same time as that one.
    """
    seconds = {}
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError):  # the thread may have ended
            seconds[int(thread.parts[4])] = int(thread.read_text().split()[1]) / 1e9
    return seconds.pop(os.getpid(), 0.0) + max(seconds.values(), default=0.0)


def _memory() -> float:
    """Return the peak memory of this process in MB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 / 1e6


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    request |= {"host": Host(*request["host"]), "steps": range(*request["steps"])}
    print(json.dumps(measure(**request)))
