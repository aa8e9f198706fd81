"""Measured processes: some hosts of a run, one after the other on this machine, and what the model says of the same hosts."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.config import stated
from grain_sft.errors import PipelineError
from grain_sft.sampling import Host
from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.demand import Block, Walk
from grain_sft.simulate.reads import Reads
from grain_sft.storage import CACHE_DIR_VARIABLE, files

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline

STEPS = 16
"""Most steps that each process takes."""

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Measured:
    """What real processes measured, and what the first of them says of all hosts.

    Attributes:
      conditions: The given conditions with the `request_ms` of the first process.
      open_s: Seconds from the start of a process until its first batch, without the reads of that batch: imports, the corpus,
        the plan and the order.
      opening: Requests, received bytes and local bytes of that.
      base_mb: Memory of a process without its batches and the answers that they are made of.
      batch_bytes: Bytes of the arrays of one batch that no other batch shares.
      measured: What each process measured: `host_process.measure`.
      predicted: What the model says of the processes after the first.
    """

    conditions: Conditions
    open_s: float
    opening: Figures
    base_mb: float
    batch_bytes: int
    measured: Sequence[Figures]
    predicted: Sequence[Figures] = ()

    def memory_mb(self, received: float) -> float:
        """Return the memory of a process whose largest batch receives some bytes."""
        return self.base_mb + _batches_mb(self.conditions, self.batch_bytes, received)

    @property
    def errors(self) -> dict[str, float]:
        """Largest error of each predicted figure, as a share of what was measured."""
        found: dict[str, float] = {}
        for measured, predicted in zip(self.measured[1:], self.predicted, strict=True):
            for name, value in predicted.items():
                known = _known(measured)[name]
                error = abs(value - known) / known if known else float(value != 0)
                found[name] = max(found.get(name, 0.0), error)
        return found


def measure_processes(
    pipeline: Pipeline, config: str, hosts: int, steps: range, conditions: Conditions, count: int
) -> Measured:
    """Return what `count` hosts, at equal distances, measure in processes of their own. Each has empty caches, as a new machine
    has, and takes the first steps.

    Args:
      pipeline: Pipeline of the config, of any host.
      config: Path of the config.
      hosts: Number of hosts of the run.
      steps: Steps of the run.
      conditions: Speeds of hosts and network.
      count: Number of processes, 1 or more. The first says how long a request takes, and what a process needs without batches;
        the others are compared with the model.

    Raises:
      PipelineError: A process failed; the last line that it printed is in the message.
    """
    numbers = sorted({round(each) for each in np.linspace(0, hosts - 1, min(hosts, count)).tolist()})
    taken = steps[:STEPS]
    measured = [_run(config, Host(number, hosts), taken, conditions) for number in numbers]
    real = _calibrated(pipeline, hosts, measured, conditions)
    return dataclasses.replace(real, predicted=[_predicted(pipeline, hosts, each, real) for each in measured[1:]])


def _run(config: str, host: Host, steps: range, conditions: Conditions) -> Figures:
    with tempfile.TemporaryDirectory(prefix="grain_sft_simulate_") as folder:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if files.cache_url() is None:
            environment[CACHE_DIR_VARIABLE] = os.path.join(folder, "derived")
        asked = {
            "config": _with_own_cache(config, os.path.join(folder, "shards")),
            "host": [host.index, host.count],
            "steps": [steps.start, steps.stop],
            "threads": conditions.threads,
            "prefetch": conditions.prefetch,
            "began": time.time(),
        }
        command = [sys.executable, "-P", "-m", "grain_sft.simulate.host_process", json.dumps(asked)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        reason = result.stderr.strip().rpartition("\n")[2]
        raise PipelineError(
            f"{config}: the process of host {host.index} of {host.count} ended with status {result.returncode}: {reason}"
        )
    figures: Figures = json.loads(result.stdout.strip().rpartition("\n")[2])
    return figures


def _with_own_cache(config: str, folder: str) -> Any:
    """Return the config with its shard cache, if it states one, in `folder`."""
    remote = stated(config)[1]["corpus"].get("remote") or {}
    if not remote.get("cache"):
        return config
    return {"inherits": os.path.abspath(config), "corpus": {"remote": {"cache": {"folder": folder}}}}


def _calibrated(pipeline: Pipeline, hosts: int, measured: Sequence[Figures], conditions: Conditions) -> Measured:
    first = measured[0]
    block = _walk(pipeline, hosts, first, dataclasses.replace(conditions, request_ms=0.0))
    requests, batch_bytes = block.requests[:, 0], first["batch_bytes"]
    if (asked := requests > 0).any():
        rest = np.array(first["batch_s"])[asked] - block.seconds[asked, 0]
        request_ms = max(0.0, 1e3 * float(np.median(rest / requests[asked])))
        conditions = dataclasses.replace(conditions, request_ms=request_ms)
    base = first["peak_mb"] - _batches_mb(conditions, batch_bytes, float(block.received.max()))
    fitted = _walk(pipeline, hosts, first, conditions)
    open_s = max(0.0, first["start_up_s"] - float(fitted.seconds[0, 0]))
    return Measured(conditions, open_s, first["opening"], base, batch_bytes, measured)


def _predicted(pipeline: Pipeline, hosts: int, measured: Figures, real: Measured) -> Figures:
    """Return what the host of a process should have measured, by the model."""
    block = _walk(pipeline, hosts, measured, real.conditions)
    sums = {name: int(getattr(block, name).sum()) for name in ("requests", "received", "local")}
    return {
        **{name: count + real.opening[name] for name, count in sums.items()},
        "start_up_s": real.open_s + float(block.seconds[0, 0]),
        "peak_mb": real.memory_mb(float(block.received.max())),
    }


def _known(measured: Figures) -> dict[str, float]:
    """Return the figures of a process that the model predicts."""
    sums = {name: measured["opening"][name] + measured["reading"][name] for name in measured["opening"]}
    return sums | {name: measured[name] for name in ("start_up_s", "peak_mb")}


def _batches_mb(conditions: Conditions, batch_bytes: int, received: float) -> float:
    """Return the memory of batches that are ready, being made and in use, and of the answers of those being made."""
    ahead = max(conditions.prefetch, conditions.threads) + conditions.threads + 1
    return (ahead * batch_bytes + 2 * conditions.threads * received) / 1e6


def _walk(pipeline: Pipeline, hosts: int, measured: Figures, conditions: Conditions) -> Block:
    """Return the model's demand of the steps that a process has made."""
    walk = Walk(Reads(pipeline), pipeline.sampler.with_host(Host(0, hosts)), conditions, [measured["host"]])
    (block,) = walk.blocks(range(*measured["made"]))
    return block
