"""Prediction of the requests, bytes, times and memory of a run on many hosts."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.pipeline import Pipeline
from grain_sft.sampling import Host, Sampler
from grain_sft.simulate.conditions import Conditions, Waits
from grain_sft.simulate.demand import Demand, DemandModel
from grain_sft.simulate.lines import answers
from grain_sft.simulate.processes import Measured, sampler_of
from grain_sft.simulate.reads import Reads
from grain_sft.storage import MOST_OPEN_FILES
from grain_sft.types import Array, Ints
from grain_sft.version import __version__

MOST_COUNTED = 1 << 27
"""Maximum number of rows of a layout for which the reads of each row are counted."""
CACHED_HOSTS = 16
"""Maximum number of hosts that are modelled if they have shard caches, because a model of every block is slow."""
POINTS = 200
"""Maximum number of points of each curve."""


class _Totals:
    """Sums, over all of `steps`, of what hosts read: `requests`, bytes `received`, and bytes of `local` files.

    Attributes:
      rows: Number of rows that the modelled hosts read.
      counts: uint32 [layout rows], how often each row is read. None if the layout has more than `MOST_COUNTED` rows, or if not
        all hosts are modelled.
      per_host: Sums over the steps, int64 [hosts], of `requests`, `received` and `local`, by name.
      checks: int64 [hosts], number of the requests that check files.
      first: Values of the first step, [hosts], of `requests`, `received`, `local` and `seconds`, by name.
      per_step: Lists by name, with one number for each step. `requests`, `received` and `local` are sums over all hosts of the
        run. `most_requests`, `most_received` and `seconds` are maxima over the modelled hosts. `waited` is the trainer's wait.
    """

    def __init__(self, layout_rows: int, model: DemandModel, steps: range) -> None:
        hosts = len(model.hosts)
        self.model = model
        self.waits = Waits(model.conditions, hosts)
        self.rows = 0
        self.counts = np.zeros(layout_rows, np.uint32) if layout_rows <= MOST_COUNTED and model.scale == 1 else None
        self.per_host = {name: np.zeros(hosts, np.int64) for name in ("requests", "received", "local")}
        self.checks = np.zeros(hosts, np.int64)
        self.first: dict[str, Ints] = {}
        names = (*self.per_host, "most_requests", "most_received", "seconds", "waited")
        self.per_step: dict[str, list[float]] = {name: [] for name in names}
        for demand in model.demands(steps):
            self._add(demand)

    def _add(self, demand: Demand) -> None:
        """Add the demand of consecutive steps to the sums, and the trainer's wait for each step."""
        self.rows += len(demand.rows)
        if self.counts is not None:
            np.add.at(self.counts, demand.rows, 1)
        for name, total in self.per_host.items():
            values = getattr(demand, name)
            total += values.sum(axis=0)
            self.per_step[name] += (values.sum(axis=1) * self.model.scale).tolist()
        self.checks += demand.checks.sum(axis=0)
        self.per_step["most_requests"] += demand.requests.max(axis=1).tolist()
        self.per_step["most_received"] += demand.received.max(axis=1).tolist()
        self.per_step["seconds"] += demand.seconds.max(axis=1).tolist()
        self.first = self.first or {name: getattr(demand, name)[0].copy() for name in (*self.per_host, "seconds")}
        requests, received, waited = (self.per_step[name] for name in ("requests", "received", "waited"))
        for step, seconds in enumerate(demand.seconds, len(waited)):
            waited.append(self.waits.add(seconds, self.model.conditions.bucket_seconds(requests[step], received[step])))


def simulate(
    pipeline: Pipeline,
    hosts: int,
    steps: range,
    conditions: Conditions | None = None,
    *,
    as_bucket: bool = False,
    restart_hosts: int | None = None,
    real: Measured | None = None,
) -> dict[str, Any]:
    """Return the requests, bytes, times and memory of a run on many hosts. docs/simulate.md describes the figures.

    Args:
      pipeline: Pipeline of the run, of any host.
      hosts: Number of hosts of the run.
      steps: Consecutive steps of the run, or of one of its stages. The hosts start at the first of these steps.
      conditions: Speeds of hosts, network and bucket. None means the defaults. If `real` is given, its conditions are used.
      as_bucket: Whether reads of local files count as requests to a bucket.
      restart_hosts: Number of hosts of a restart after the last of `steps`. None means `hosts`.
      real: Measurements of real processes. None means that the start-up time and the memory are not predicted.

    Raises:
      SamplerError: `hosts` or `restart_hosts` does not divide the batch, `steps` are not consecutive, or the run does not
        have these steps.
    """
    conditions = (conditions or Conditions()) if real is None else real.conditions
    sampler = sampler_of(pipeline, hosts, steps)
    model = _model_of(Reads(pipeline, all_remote=as_bucket), sampler, conditions)
    totals = _Totals(len(pipeline.source), model, steps)
    batch_size = sampler.batch_sizes.at(steps.start)
    figures = {
        "version": __version__,
        "hosts": hosts,
        "as_bucket": as_bucket,
        "steps": [steps.start, steps.stop],
        "conditions": vars(conditions),
        "walked_hosts": len(model.hosts),  # hosts that the model computes one by one
        "run": {
            "rows": len(pipeline.source),
            "sequence_length": pipeline.source.layout.sequence_length,
            "rows_per_host": batch_size // hosts,
            "global_batch_size": batch_size,
        },
        "coverage": _coverage(totals, sampler, steps),
        "per_host": {name: _spread(total) for name, total in totals.per_host.items()},
        "checks": _spread(totals.checks),
        "all_hosts": {name: float(total.sum()) * totals.model.scale for name, total in totals.per_host.items()},
        "first_step": {name: _spread(values) for name, values in totals.first.items()},
        "steady": _steady(totals, steps),
        "first_batches": _first_batches(totals, real, hosts),
        "files": _files(model),
        "waits": _waits(totals.per_step["waited"], totals.waits.now),
        "cache": _cache(model),
        # after "cache", because the restart changes the caches of the model
        "restart": _restart(pipeline, model, hosts if restart_hosts is None else restart_hosts, steps.stop, real),
        "curves": _curves(totals.per_step, steps),
        **_of_real_processes(totals, real, hosts),
    }
    return figures | {"answers": answers(figures)}


def _model_of(reads: Reads, sampler: Sampler, conditions: Conditions) -> DemandModel:
    """Return the model of all hosts or, if they have shard caches, of `CACHED_HOSTS` evenly spaced hosts."""
    hosts = sampler.host.count
    has_cache = any(gather.options.cache is not None for gather in reads.gathers)
    modelled = min(hosts, CACHED_HOSTS) if has_cache else hosts
    numbers = np.unique(np.linspace(0, hosts - 1, modelled).round().astype(np.int64))
    return DemandModel(reads, sampler, conditions, numbers.tolist())


def _spread(values: Array) -> dict[str, float]:
    """Return the mean, the least and the most of a figure of the hosts."""
    return {"mean": float(values.mean()), "least": float(values.min()), "most": float(values.max())}


def _coverage(totals: _Totals, sampler: Sampler, steps: range) -> dict[str, Any]:
    """Return how many rows are read, how many slots the batches have, and how often each row is read."""
    sizes, counts = sampler.batch_sizes, totals.counts
    return {
        "rows_read": round(totals.rows * totals.model.scale),
        "slots": sizes.before(steps.stop) - sizes.before(steps.start),
        "distinct": None if counts is None else int(np.count_nonzero(counts)),
        "most_often": None if counts is None else int(counts.max()),
    }


def _steady(totals: _Totals, steps: range) -> dict[str, Any]:
    """Return means over the second half of the steps, and figures of all steps: peaks, slowest batch, mean time of a step."""
    seconds = totals.model.conditions.step_ms / 1e3  # of a step without waits
    figures: dict[str, Any] = {"seconds_a_step": totals.waits.now / len(steps)}
    for name in ("requests", "received", "local"):
        values = np.array(totals.per_step[name])
        figures[name] = float(values[len(steps) // 2 :].mean())
        figures[f"{name}_per_second"] = figures[name] / seconds
        figures[f"{name}_peak_per_second"] = float(values.max()) / seconds
    figures["slowest_batch_s"] = float(np.max(totals.per_step["seconds"]))
    return figures


def _files(model: DemandModel) -> dict[str, Any]:
    """Return the numbers of files: all, local, checked by a host, and open at the same time."""
    gathers = model.reads.gathers
    local = sum(int((~gather.remote).sum()) for gather in gathers)
    sockets = max((gather.options.requests for gather in gathers if gather.remote.any()), default=0)
    # local files that stay open, and a connection for each concurrent request of each thread
    opened = min(MOST_OPEN_FILES, local) + sockets * model.conditions.threads
    count = sum(len(gather.files) for gather in gathers)
    checked = _spread(np.concatenate(model.checked, axis=1).sum(axis=1))
    return {"files": count, "local": local, "checked": checked, "most_descriptors": opened}


def _waits(waited: Sequence[float], seconds: float) -> dict[str, float]:
    """Return the wait for the first step, and the waits for later steps with their share of the run's `seconds`."""
    later = np.array(waited[1:] or [0.0])
    return {
        "first_s": waited[0],
        "later_s": float(later.sum()),
        "longest_s": float(later.max()),
        "steps_that_wait": int(np.count_nonzero(later > 1e-3)),
        "share": float(later.sum()) / max(seconds, 1e-9),
    }


def _cache(model: DemandModel) -> dict[str, Any] | None:
    """Return the figures of the shard caches, as spreads over the modelled hosts; None without caches."""
    if not model.caches:
        return None
    # for each modelled host, its caches
    caches_of_hosts = list(zip(*model.caches.values(), strict=True))
    figures: dict[str, Any] = {"hosts": len(caches_of_hosts)}
    for key, attribute in {"hits": "hits", "misses": "misses", "bytes": "used"}.items():
        sums = [sum(getattr(cache, attribute) for cache in caches) for caches in caches_of_hosts]
        figures[key] = _spread(np.array(sums))
    return figures


def _first_batches(totals: _Totals, real: Measured | None, hosts: int) -> dict[str, float]:
    """Return the requests of all hosts for their first `prefetch` batches, and the seconds that the bucket takes for them.

    With `real`, the figures include the requests that open the corpus.
    """
    conditions = totals.model.conditions
    batches = min(conditions.prefetch, len(totals.per_step["requests"]))
    asked = {name: sum(totals.per_step[name][:batches]) for name in ("requests", "received")}
    if real is not None:
        asked = {name: count + real.fit.opening[name] * hosts for name, count in asked.items()}
    return {"batches": batches, "requests": asked["requests"], "bucket_s": conditions.bucket_seconds(**asked)}


def _of_real_processes(totals: _Totals, real: Measured | None, hosts: int) -> dict[str, Any]:
    """Return the figures of `real`. The entry `start` has the figures until all hosts have their first batch."""
    if real is None:
        return {"start": None, "measured": [], "predicted": [], "errors": None}
    opening = real.fit.opening
    start = {
        "seconds": _opening_seconds(real, hosts) + totals.per_step["waited"][0],
        "opening_requests": opening["requests"],
        "opening_received": opening["received"],
        "requests_of_all": opening["requests"] * hosts + totals.per_step["requests"][0],
        "memory_mb": real.fit.memory_mb(real.conditions, max(totals.per_step["most_received"])),
    }
    return {"start": start, "measured": [*real.measured], "predicted": [*real.predicted], "errors": real.errors}


def _opening_seconds(real: Measured, hosts: int) -> float:
    """Return the seconds until all hosts have opened the corpus."""
    opening = real.fit.opening
    bucket_s = real.conditions.bucket_seconds(opening["requests"] * hosts, opening["received"] * hosts)
    return max(real.fit.start_s(real.conditions), bucket_s)


def _restart(pipeline: Pipeline, model: DemandModel, hosts: int, step: int, real: Measured | None) -> dict[str, Any] | None:
    """Return the figures of a restart at `step` on hosts that have the shard caches of `model`; None if the run has ended."""
    sampler = pipeline.sampler.with_host(Host(0, hosts))
    if step >= sampler.end_of_batches:
        return None
    sampler.check_from(step)
    restarted = _model_of(model.reads, sampler, model.conditions)  # its hosts check all files again
    for options, caches in restarted.caches.items():
        kept = model.caches[options][: len(caches)]
        caches[: len(kept)] = kept  # hosts that the first run did not have begin with empty caches
    totals = _Totals(len(pipeline.source), restarted, range(step, step + 1))
    seconds = totals.per_step["waited"][0]
    return {
        "hosts": hosts,
        "step": step,
        "requests": _spread(totals.first["requests"]),
        "received": _spread(totals.first["received"]),
        "first_batch_s": seconds,
        "recover_s": None if real is None else _opening_seconds(real, hosts) + seconds,
    }


def _curves(per_step: Mapping[str, list[float]], steps: range) -> dict[str, Any]:
    """Return curves of at most `POINTS` groups of steps: sums of `waited`, maxima of `seconds`, means of the others."""
    edges = np.unique(np.linspace(0, len(steps), min(len(steps), POINTS) + 1).astype(np.int64))
    curves: dict[str, Any] = {"step": (edges[:-1] + steps.start).tolist()}
    for name, values in per_step.items():
        reduce = np.maximum if name == "seconds" else np.add
        groups = reduce.reduceat(np.array(values, np.float64), edges[:-1])
        curves[name] = (groups if name in ("seconds", "waited") else groups / np.diff(edges)).tolist()
    return curves
