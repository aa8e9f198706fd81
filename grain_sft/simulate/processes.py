"""Measurements of real host processes on this machine, and the fit of `DemandModel` to them."""

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from grain_sft.child_environment import child_environment, run_python
from grain_sft.config import overlay, read_config
from grain_sft.errors import SamplerError
from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host, Sampler
from grain_sft.simulate.conditions import Conditions
from grain_sft.simulate.demand import Demand, DemandModel
from grain_sft.simulate.reads import Reads
from grain_sft.storage import CACHE_DIR_VARIABLE, SHARD_CACHE_VARIABLE, files, temporary_folder

MAX_STEPS = 16
"""Maximum number of steps per process."""

Figures = Mapping[str, Any]
"""Figures of one process, by name."""


class Fit(NamedTuple):
    """Figures that the simulation takes from measured processes.

    Attributes:
      request_ms: Milliseconds that a request takes in addition to `Conditions.latency_ms`.
      open_s: Seconds from the start of a process until its first batch, without the reads of that batch.
      open_cpu_s: Seconds of processor time until the pipeline was open.
      opening: Requests, received bytes and local bytes until the pipeline was open, by name.
      base_mb: MB of memory of a process, without its batches and without the answers of the bucket.
      batch_bytes: Bytes of a batch, without the arrays that all batches share.
    """

    request_ms: float
    open_s: float
    open_cpu_s: float
    opening: Mapping[str, int]
    base_mb: float
    batch_bytes: float

    @classmethod
    def median(cls, fits: Sequence[Self]) -> Self:
        """Return the median of each figure of several fits."""
        opening = {name: statistics.median_low([fit.opening[name] for fit in fits]) for name in fits[0].opening}
        figures = (name for name in cls._fields if name != "opening")
        medians = {name: statistics.median([getattr(fit, name) for fit in fits]) for name in figures}
        return cls(opening=opening, **medians)

    def start_s(self, conditions: Conditions) -> float:
        """Return `open_s` for a process with `conditions.cores` cores."""
        return self.open_s + self.open_cpu_s * (conditions.slowdown - 1)

    def memory_mb(self, conditions: Conditions, received: float) -> float:
        """Return the MB of memory of a process whose largest batch receives `received` bytes from the bucket."""
        ready = max(conditions.prefetch, conditions.threads)
        batches = ready + conditions.threads + 1  # each thread makes one batch, and the trainer uses one batch
        answers = 2 * conditions.threads * received  # each thread that makes a batch is taken to hold its answers twice
        return self.base_mb + (batches * self.batch_bytes + answers) / 1e6


class Measured(NamedTuple):
    """Measurements of real processes, and the model's predictions of them.

    Attributes:
      conditions: Assumed conditions, with the `request_ms` of the fit.
      fit: Median of the fits to each process.
      measured: Figures that `host_process.measure` returned for each process.
      predicted: Predicted figures of each process. The model is fitted to the other processes, so a single process has none.
    """

    conditions: Conditions
    fit: Fit
    measured: Sequence[Figures]
    predicted: Sequence[Figures]

    @property
    def errors(self) -> dict[str, float]:
        """Largest relative error of each predicted figure, without figures whose measurement and prediction are 0."""
        largest: dict[str, float] = {}
        for measured, predicted in zip(self.measured, self.predicted, strict=False):  # `predicted` may be empty
            opening, reading = measured["opening"], measured["reading"]
            for name, prediction in predicted.items():
                figure = opening[name] + reading[name] if name in opening else measured[name]
                if prediction or figure:
                    largest[name] = max(largest.get(name, 0.0), abs(prediction - figure) / figure if figure else 1.0)
        return largest


def measure_processes(
    pipeline: Pipeline, config: str, hosts: int, steps: range, conditions: Conditions, count: int
) -> Measured:
    """Measure at most `count` evenly spaced hosts in the first `MAX_STEPS` of `steps`, and fit the model to their figures.

    Each host runs in its own process with empty caches, as on a new machine.

    Args:
      pipeline: Pipeline of the config, of any host.
      config: Path of the config.
      hosts: Number of hosts of the run.

    Raises:
      SamplerError: `hosts` does not divide the batch, or the run does not have the steps.
      PipelineError: A process failed, or took more than an hour.
    """
    sampler_of(pipeline, hosts, steps)
    numbers = sorted({round(host) for host in np.linspace(0, hosts - 1, min(hosts, count)).tolist()})
    measured = [run_host(config, Host(number, hosts), steps[:MAX_STEPS], conditions) for number in numbers]
    # with one core, the model adds no waits for a processor, and the measured `start_up_s` has none
    one_core = dataclasses.replace(conditions, cores=1.0)
    fits = [_fit(pipeline, hosts, figures, one_core) for figures in measured]
    predicted = []
    for number, figures in enumerate(measured):
        if other_fits := fits[:number] + fits[number + 1 :]:
            predicted.append(_predicted(pipeline, hosts, figures, Fit.median(other_fits), one_core))
    fit = Fit.median(fits)
    return Measured(dataclasses.replace(conditions, request_ms=fit.request_ms), fit, measured, predicted)


def sampler_of(pipeline: Pipeline, hosts: int, steps: range) -> Sampler:
    """Return the sampler of host 0 of `hosts`, or raise a SamplerError if the run does not have the steps."""
    sampler = pipeline.sampler.with_host(Host(0, hosts))
    end = sampler.end_of_batches
    if not isinstance(steps, range) or steps.step != 1 or not 0 <= steps.start < steps.stop <= end:
        last = "" if end == sys.maxsize else f" <= {end}, where the run or its stage ends"
        raise SamplerError(f"{steps}: expected consecutive steps, 0 <= first < stop{last}.")
    sampler.check_from(steps.start)
    return sampler


def run_host(config: str, host: Host, steps: range, conditions: Conditions) -> Figures:
    """Run `host_process.measure` for one host, in its own process with empty caches, and return its figures.

    Plans and orders that are cached in a bucket are used, as on new machines of a run.
    """
    with temporary_folder("grain_sft_simulate_") as folder:
        request = {"config": _config_with_own_caches(config, folder), "host": [host.index, host.count]}
        request |= {"steps": [steps.start, steps.stop], "threads": conditions.threads, "prefetch": conditions.prefetch}
        request["began"] = time.time()
        environment = child_environment()
        if files.cache_url() is None:
            environment[CACHE_DIR_VARIABLE] = os.path.join(folder, "derived")
        if environment.get(SHARD_CACHE_VARIABLE):
            environment[SHARD_CACHE_VARIABLE] = os.path.join(folder, "shards")
        title = f"{config}: the process of host {host.index} of {host.count}"
        arguments = ("-P", "-m", "grain_sft.simulate.host_process", json.dumps(request))
        return run_python(title, *arguments, environment=environment)


def _config_with_own_caches(config: str, folder: str) -> Any:
    """Return the config with the shard caches of its corpora moved to `folder`. Corpora that shared a cache still share one."""
    folders: dict[str, str] = {}  # new folder of each cache, by its folder in the config; empty without shard caches

    def changes_of(corpus: Mapping[str, Any]) -> dict[str, Any]:
        """Return the changes of a section `corpus` that move its shard caches."""
        changes: dict[str, Any] = {}
        if cache := (corpus.get("remote") or {}).get("cache"):
            new_folder = folders.setdefault(cache["folder"], os.path.join(folder, f"shards_{len(folders)}"))
            changes["remote"] = {"cache": {"folder": new_folder}}
        sources = {name: changes_of(source) for name, source in (corpus.get("mixture") or {}).items()}
        if any(sources.values()):
            changes["mixture"] = sources
        return changes

    sections = read_config(config)[1]
    moved: dict[str, Any] = {"inherits": files.absolute(files.normalize(config))}
    if changes := changes_of(sections.get("corpus", {})):  # perhaps only the stages have corpora
        moved["corpus"] = changes
    if stages := sections.get("stages"):  # a config replaces the whole list that it inherits
        moved["stages"] = [overlay(stage, {"corpus": changes_of(stage.get("corpus", {}))}) for stage in stages]
        # Stages that `replace` amendments made contain the config's schedule. A config with stages must not inherit a
        # `sampler.schedule`, too.
        moved["sampler"] = {"schedule": None}
    return moved if folders else config


def _fit(pipeline: Pipeline, hosts: int, measured: Figures, conditions: Conditions) -> Fit:
    """Return the fit of the model to the figures of one process.

    `request_ms`, `open_s` and `base_mb` are the parts of the measured figures that the model does not explain. For example, the
    model with `request_ms` 0 gives 0.1 s for a batch of 40 requests, and the process took 0.3 s. The missing 0.2 s are 5 ms for
    each request.
    """
    demand = _modelled_demand(pipeline, hosts, measured, dataclasses.replace(conditions, request_ms=0.0))
    requests = demand.requests[:, 0]  # the demand has one column: the host of this process
    request_ms = conditions.request_ms
    has_requests = requests > 0
    if has_requests.any():
        unexplained_s = np.array(measured["batch_s"])[has_requests] - demand.seconds[has_requests, 0]
        request_ms = max(0.0, 1e3 * float(np.median(unexplained_s / requests[has_requests])))
    fitted = _modelled_demand(pipeline, hosts, measured, dataclasses.replace(conditions, request_ms=request_ms))
    open_s = max(0.0, measured["start_up_s"] - float(fitted.seconds[0, 0]))
    fit = Fit(request_ms, open_s, measured["open_cpu_s"], measured["opening"], 0.0, measured["batch_bytes"])
    return fit._replace(base_mb=measured["peak_mb"] - fit.memory_mb(conditions, float(demand.received.max())))


def _predicted(pipeline: Pipeline, hosts: int, measured: Figures, fit: Fit, conditions: Conditions) -> Figures:
    """Return the figures that the model with `fit` predicts for the steps that a process made."""
    conditions = dataclasses.replace(conditions, request_ms=fit.request_ms)
    demand = _modelled_demand(pipeline, hosts, measured, conditions)
    return {
        **{name: count + int(getattr(demand, name).sum()) for name, count in fit.opening.items()},
        "start_up_s": fit.start_s(conditions) + float(demand.seconds[0, 0]),
        "peak_mb": fit.memory_mb(conditions, float(demand.received.max())),
    }


def _modelled_demand(pipeline: Pipeline, hosts: int, measured: Figures, conditions: Conditions) -> Demand:
    """Return the model's demand for the steps whose batches a process made."""
    model = DemandModel(Reads(pipeline), pipeline.sampler.with_host(Host(0, hosts)), conditions, [measured["host"]])
    steps = range(*measured["made"])
    (demand,) = model.demands(steps, min_steps=len(steps))
    return demand
