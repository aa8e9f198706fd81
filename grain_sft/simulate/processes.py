"""Real host processes, run one after the other on this machine, and the model that is fitted to them."""

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from grain_sft.child_environment import child_environment, run_python
from grain_sft.config import read_config
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host
from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.demand import Block, Walk
from grain_sft.simulate.reads import Reads
from grain_sft.storage import CACHE_DIR_VARIABLE, SHARD_CACHE_VARIABLE, files

MAX_STEPS = 16
"""Maximum number of steps per process."""

Figures = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Fit:
    """Figures of real processes that the model uses.

    Attributes:
      request_ms: Milliseconds of a request beyond `latency_ms`.
      open_s: Seconds from the start of a process until its first batch, without the reads of that batch: imports, the corpus,
        the plan and the order.
      open_cpu_s: Processor seconds until the pipeline was opened.
      opening: Requests, received bytes and local bytes until the pipeline was opened.
      base_mb: Memory of a process without its batches and the answers that they are made of.
      batch_bytes: Bytes of the arrays of one batch that no other batch shares.
    """

    request_ms: float
    open_s: float
    open_cpu_s: float
    opening: Mapping[str, int]
    base_mb: float
    batch_bytes: int

    @classmethod
    def median(cls, fits: Sequence[Self]) -> Self:
        """Return the median of each figure of `fits`."""
        opening = {name: statistics.median_low([each.opening[name] for each in fits]) for name in fits[0].opening}
        names = ("request_ms", "open_s", "open_cpu_s", "base_mb")
        medians = {name: statistics.median([getattr(each, name) for each in fits]) for name in names}
        return cls(opening=opening, batch_bytes=statistics.median_low([each.batch_bytes for each in fits]), **medians)

    def start_s(self, conditions: Conditions) -> float:
        """Return `open_s` under `conditions`: its processor time grows with the slowdown."""
        return self.open_s + self.open_cpu_s * (conditions.slowdown - 1)

    def memory_mb(self, conditions: Conditions, received: float) -> float:
        """Return the memory of a process whose largest batch receives `received` bytes."""
        return self.base_mb + _batches_mb(conditions, self.batch_bytes, received)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What real processes measured, and what the model predicts of them.

    Attributes:
      conditions: The given conditions with the `request_ms` of the processes.
      fit: The median of the processes.
      measured: What each process measured: `host_process.measure`.
      predicted: What the model, fitted to the other processes, predicts of each process; empty for one process.
    """

    conditions: Conditions
    fit: Fit
    measured: Sequence[Figures]
    predicted: Sequence[Figures]

    @property
    def errors(self) -> dict[str, float]:
        """Largest relative error of each predicted figure. Figures that are 0 in both are left out."""
        found: dict[str, float] = {}
        for measured, predicted in zip(self.measured, self.predicted, strict=False):
            for name, value in predicted.items():
                opening = measured["opening"]
                figure = opening[name] + measured["reading"][name] if name in opening else measured[name]
                if value or figure:
                    found[name] = max(found.get(name, 0.0), abs(value - figure) / figure if figure else 1.0)
        return found


def measure_processes(
    pipeline: Pipeline, config: str, hosts: int, steps: range, conditions: Conditions, count: int
) -> Measured:
    """Measure `count` evenly spaced hosts over the first `MAX_STEPS` steps, each in its own process with empty caches, as on a
    new machine.

    Args:
      pipeline: Pipeline of the config, of any host.
      config: Path of the config.
      hosts: Number of hosts of the run.
      steps: Steps of the run.
      conditions: Speeds of hosts and network.
      count: Number of processes, 1 or more. The model takes its fit from all of them. To measure its error, each is compared
        with the model that is fitted to the others.

    Raises:
      PipelineError: A process failed, and the last line that it printed is in the message; or it took more than an hour.
    """
    numbers = sorted({round(each) for each in np.linspace(0, hosts - 1, min(hosts, count)).tolist()})
    taken = steps[:MAX_STEPS]
    measured = [run_host(config, Host(number, hosts), taken, conditions) for number in numbers]
    alone = dataclasses.replace(conditions, cores=1.0)  # measured start-up excludes the wait for the processor
    fits = [_fit(pipeline, hosts, each, alone) for each in measured]
    others = [Fit.median(fits[:number] + fits[number + 1 :]) for number in range(len(fits)) if len(fits) > 1]
    predicted = [predict(pipeline, hosts, each, fit, alone) for each, fit in zip(measured, others, strict=False)]
    fit = Fit.median(fits)
    return Measured(dataclasses.replace(conditions, request_ms=fit.request_ms), fit, measured, predicted)


def run_host(config: str, host: Host, steps: range, conditions: Conditions) -> Figures:
    """Return the figures of `host_process.measure` for one host, in its own process with empty caches. A cache of derived
    files in a bucket is kept."""
    with tempfile.TemporaryDirectory(prefix="grain_sft_simulate_") as folder:
        environment = _with_own_caches(child_environment(), folder)
        request = {"config": _config_with_own_caches(config, folder), "host": [host.index, host.count]}
        request |= {"steps": [steps.start, steps.stop], "threads": conditions.threads, "prefetch": conditions.prefetch}
        request["began"] = time.time()
        what = f"{config}: the process of host {host.index} of {host.count}"
        words = ("-P", "-m", "grain_sft.simulate.host_process", json.dumps(request))
        return run_python(what, *words, environment=environment)


def _with_own_caches(environment: Mapping[str, str], folder: str) -> dict[str, str]:
    """Return the environment with the caches that it names, and that of derived files, in `folder`."""
    names = {CACHE_DIR_VARIABLE: "derived"} if files.cache_url() is None else {}
    if environment.get(SHARD_CACHE_VARIABLE):
        names[SHARD_CACHE_VARIABLE] = "shards"
    return {**environment, **{name: os.path.join(folder, own) for name, own in names.items()}}


def _config_with_own_caches(config: str, folder: str) -> Any:
    """Return the config with the shard caches that its corpora state in `folder`; equal folders stay equal."""
    folders: dict[str, str] = {}

    def own(corpus: Mapping[str, Any]) -> dict[str, Any]:
        sections: dict[str, Any] = {}
        if cache := (corpus.get("remote") or {}).get("cache"):
            found = folders.setdefault(cache["folder"], os.path.join(folder, f"shards_{len(folders)}"))
            sections["remote"] = {"cache": {"folder": found}}
        sources = {name: own(source) for name, source in (corpus.get("mixture") or {}).items()}
        return sections | ({"mixture": sources} if any(sources.values()) else {})

    sections = own(read_config(config)[1]["corpus"])
    return {"inherits": os.path.abspath(config), "corpus": sections} if sections else config


def _fit(pipeline: Pipeline, hosts: int, measured: Figures, conditions: Conditions) -> Fit:
    """Return the figures of one process that, with the model's demand of its steps, give what it measured."""
    block = _modelled_demand(pipeline, hosts, measured, dataclasses.replace(conditions, request_ms=0.0))
    requests, batch_bytes, request_ms = block.requests[:, 0], measured["batch_bytes"], conditions.request_ms
    if (has_requests := requests > 0).any():
        rest = np.array(measured["batch_s"])[has_requests] - block.seconds[has_requests, 0]
        request_ms = max(0.0, 1e3 * float(np.median(rest / requests[has_requests])))
    base = measured["peak_mb"] - _batches_mb(conditions, batch_bytes, float(block.received.max()))
    fitted = _modelled_demand(pipeline, hosts, measured, dataclasses.replace(conditions, request_ms=request_ms))
    open_s = max(0.0, measured["start_up_s"] - float(fitted.seconds[0, 0]))
    return Fit(request_ms, open_s, measured["open_cpu_s"], measured["opening"], base, batch_bytes)


def predict(pipeline: Pipeline, hosts: int, measured: Figures, fit: Fit, conditions: Conditions) -> Figures:
    """Return the model's prediction of the figures that a process measured."""
    conditions = dataclasses.replace(conditions, request_ms=fit.request_ms)
    block = _modelled_demand(pipeline, hosts, measured, conditions)
    sums = {name: int(getattr(block, name).sum()) for name in ("requests", "received", "local")}
    return {
        **{name: count + fit.opening[name] for name, count in sums.items()},
        "start_up_s": fit.start_s(conditions) + float(block.seconds[0, 0]),
        "peak_mb": fit.memory_mb(conditions, float(block.received.max())),
    }


def _batches_mb(conditions: Conditions, batch_bytes: int, received: float) -> float:
    """Return the memory of batches that are ready, being made and in use, and of the answers of those being made."""
    batches_in_memory = max(conditions.prefetch, conditions.threads) + conditions.threads + 1
    return (batches_in_memory * batch_bytes + 2 * conditions.threads * received) / 1e6


def _modelled_demand(pipeline: Pipeline, hosts: int, measured: Figures, conditions: Conditions) -> Block:
    """Return the demand of the steps that a process made, by the model."""
    walk = Walk(Reads(pipeline), pipeline.sampler.with_host(Host(0, hosts)), conditions, [measured["host"]])
    (block,) = walk.blocks(range(*measured["made"]))
    return block
