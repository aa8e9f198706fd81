"""Metrics of what a run reads and hands out, in prometheus_client's default registry.

Any server of that registry serves them: Grain's, `prometheus_client.start_http_server`, or `start_server` in this module.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.errors import MissingExtraError
from grain_sft.pipeline import Delivery, Observer, Pipeline, standing_observers
from grain_sft.storage import ForkSafeLock, activity

if TYPE_CHECKING:
    from prometheus_client import Metric

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histograms' buckets."""

_MOST_UNCOUNTED = 1 << 10  # batches
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_NEXT_STEP = "grain_sft_next_step", "Step of the next batch to be handed out."
_COUNTERS = {
    "rows": "Rows handed out.",
    "tokens": "Tokens handed out, padding included.",
    "filtered_rows": "Rows without loss after NgramFilter, in all batches made.",
    "remote_requests": "Requests for remote files, repeated ones included.",
    "remote_retries": "Requests that failed and were made again.",
    "remote_received_bytes": "Bytes of remote files that came over the network.",
    "shard_cache_hits": "Blocks that were in the shard cache when they were wanted.",
    "shard_cache_misses": "Blocks that were not in the shard cache when they were wanted.",
    "shard_cache_fetched_bytes": "Bytes fetched into the shard cache.",
}
_READ = "grain_sft_read_bytes", "Bytes of rows that were read, by where their files are.", ["store"]
_STORES = {"local_bytes": "local", "remote_bytes": "remote"}
_HISTOGRAMS = {
    "wait": ("grain_sft_wait_seconds", "Time that next() took for each batch handed out."),
    "make": ("grain_sft_make_seconds", "Time that a thread took to make each batch."),
}


class Metrics(Observer):
    """Observer that counts batches made and handed out, and exports the counters of `grain_sft.storage.activity`.

    Each process has one. It counts in Python and makes metrics only when prometheus_client collects them, because a dozen
    calls of prometheus_client take longer than the copies of a small batch. Where several processes share a folder,
    $PROMETHEUS_MULTIPROC_DIR, it updates prometheus_client's own counters after each batch instead. Without
    prometheus_client the counts are not exported.
    """

    def __init__(self) -> None:
        self._next_step = 0
        self._last: Delivery | None = None
        self._buckets = {name: np.zeros(len(_SECONDS) + 1, np.int64) for name in _HISTOGRAMS}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)
        self._made: list[float] = []  # seconds of batches that are not counted yet
        self._handed_out: list[float] = []  # step, rows, tokens, seconds per batch; flat: no objects for the GC
        self._lock = ForkSafeLock()
        self._shared: _SharedMetrics | None = None
        try:
            import prometheus_client  # Grain has already imported it if it is installed
        except ImportError:
            return
        if _FOLDER_VARIABLE in os.environ:
            self._shared = _SharedMetrics()
        else:
            prometheus_client.REGISTRY.register(self)

    def batch_made(self, pipeline: Pipeline, step: int, seconds: float) -> None:
        self._made.append(seconds)
        if self._shared is not None or len(self._made) > _MOST_UNCOUNTED:
            self._count()

    def batch_handed_out(self, delivery: Delivery) -> None:
        if delivery is self._last:  # an exception interrupted its return, and it is handed out again
            return
        self._last = delivery
        self._handed_out.extend((delivery.step, delivery.rows, delivery.tokens, delivery.seconds))
        if self._shared is not None or len(self._handed_out) > 4 * _MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Count the batches made and handed out since the last call."""
        with self._lock.lock:
            handed_out = _take(self._handed_out)
            steps, rows, tokens, waits = (handed_out[field::4] for field in range(4))
            seconds = {"wait": waits, "make": _take(self._made)}
            activity.count(rows=int(sum(rows)), tokens=int(sum(tokens)))
            if steps:
                self._next_step = int(steps[-1]) + 1
            if self._shared is not None:
                self._shared.update(activity.counts, seconds, self._next_step)
                return
            for name, values in seconds.items():
                self._sums[name] += sum(values)
                self._buckets[name] += np.bincount(np.searchsorted(_SECONDS, values), minlength=len(_SECONDS) + 1)

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics, as prometheus_client's collector protocol requires."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        self._count()
        with self._lock.lock:
            totals = {name: found.cumsum().tolist() for name, found in self._buckets.items()}
            counts, sums, next_step = dict(activity.counts), dict(self._sums), self._next_step
        for name, texts in _HISTOGRAMS.items():
            buckets = list(zip((*map(str, _SECONDS), "+Inf"), totals[name], strict=True))
            yield HistogramMetricFamily(*texts, buckets=buckets, sum_value=sums[name])
        yield GaugeMetricFamily(*_NEXT_STEP, value=next_step)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"grain_sft_{name}", text, value=counts[name])
        read = CounterMetricFamily(_READ[0], _READ[1], labels=_READ[2])
        for name, store in _STORES.items():
            read.add_metric([store], counts[name])
        yield read


def _take(values: list[float]) -> list[float]:
    """Remove and return the items of a list, to which other threads may append meanwhile."""
    found = values[:]
    del values[: len(found)]
    return found


class _SharedMetrics:
    """Metrics of prometheus_client, which shares them between processes."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._histograms = {name: Histogram(*texts, buckets=_SECONDS) for name, texts in _HISTOGRAMS.items()}
        self._gauge = Gauge(*_NEXT_STEP, multiprocess_mode="mostrecent")
        self._counters: dict[str, Any] = {name: Counter(f"grain_sft_{name}", text) for name, text in _COUNTERS.items()}
        read = Counter(*_READ)
        self._counters |= {name: read.labels(store) for name, store in _STORES.items()}
        self._sent = dict.fromkeys(self._counters, 0)

    def update(self, counts: Mapping[str, int], seconds: Mapping[str, list[float]], next_step: int) -> None:
        """Update the metrics; `counts` are totals, `seconds` only the values since the last update."""
        for name, values in seconds.items():
            for value in values:
                self._histograms[name].observe(value)
        for name, value in counts.items():
            if value != self._sent[name]:
                self._counters[name].inc(value - self._sent[name])
                self._sent[name] = value
        if next_step:
            self._gauge.set(next_step)


def start_server(port: int = 9431, address: str = "127.0.0.1") -> int:
    """Serve this process's metrics, including Grain's, at http://ADDRESS:PORT/metrics until the process ends.

    If $PROMETHEUS_MULTIPROC_DIR is set before Python starts, serve the metrics of all processes that write to that folder,
    including worker processes.

    Args:
      port: Port to listen on; 0 for any free port.
      address: Address to listen on; "0.0.0.0" to accept other machines.

    Returns:
      Port that the server listens on.

    Raises:
      MissingExtraError: prometheus_client is not installed.
      OSError: The port is taken.
    """
    try:
        import prometheus_client
        from prometheus_client import multiprocess
    except ImportError as error:
        raise MissingExtraError.of("a server of metrics", "prometheus-client", "metrics") from error

    standing_observers()
    registry = prometheus_client.REGISTRY
    if _FOLDER_VARIABLE in os.environ:
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    server, _ = prometheus_client.start_http_server(port, address, registry)
    return int(server.server_port)
