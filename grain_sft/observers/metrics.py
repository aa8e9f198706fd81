"""Metrics of what a run reads and hands out, in prometheus_client's default registry.

Any server of that registry serves them: Grain's, `prometheus_client.start_http_server`, or `start_server` in this module.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from grain_sft.errors import MissingExtraError
from grain_sft.pipeline import Delivery, Observer, Pipeline, standing_observers
from grain_sft.storage import ForkSafeLock, activity

if TYPE_CHECKING:
    from prometheus_client import Metric

_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_MOST_UNCOUNTED = 1 << 10  # batches
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
_NEXT_STEP = "grain_sft_next_step", "The step whose batch is next handed out."
_COUNTERS = {
    "rows": "Rows handed out.",
    "tokens": "Tokens handed out, padding included.",
    "filtered_rows": "Rows whose loss NgramFilter took off, of batches made.",
    "remote_requests": "Requests for remote files, repeated ones included.",
    "remote_retries": "Requests that failed and were made again.",
    "remote_received_bytes": "Bytes of remote files that came over the network.",
    "shard_cache_hits": "Blocks that the shard cache held when they were wanted.",
    "shard_cache_misses": "Blocks that it did not hold.",
    "shard_cache_fetched_bytes": "Bytes fetched into the shard cache.",
}
_READ = "grain_sft_read_bytes", "Bytes of rows that were read, by where their files are.", ["store"]
_STORES = {"local_bytes": "local", "remote_bytes": "remote"}
_HISTOGRAMS = {
    "wait": ("grain_sft_wait_seconds", "How long next() took, of each batch handed out."),
    "make": ("grain_sft_make_seconds", "How long each batch took to be made, by whichever thread."),
}


class Metrics(Observer):
    """Observer that counts batches made and handed out, and exports the counters of `grain_sft.storage.activity`.

    Each process has one. It counts in Python and makes metrics only when prometheus_client collects them, because a dozen
    calls of prometheus_client take longer than the copies of a small batch. Where several processes share a folder,
    $PROMETHEUS_MULTIPROC_DIR, it updates prometheus_client's own counters after each batch instead. Without
    prometheus_client the counts are not exported.
    """

    def __init__(self) -> None:
        self._counts = {"rows": 0, "tokens": 0}
        self._next_step = 0
        self._last: Delivery | None = None
        self._buckets = {name: [0] * (len(_SECONDS) + 1) for name in _HISTOGRAMS}
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
            seconds = {"make": _taken(self._made)}
            handed_out = _taken(self._handed_out)
            steps, rows, tokens, seconds["wait"] = (handed_out[field::4] for field in range(4))
            for name, values in seconds.items():
                for value in values:
                    self._buckets[name][bisect.bisect_left(_SECONDS, value)] += 1
                self._sums[name] += sum(values)
            if steps:
                self._counts["rows"] += int(sum(rows))
                self._counts["tokens"] += int(sum(tokens))
                self._next_step = int(steps[-1]) + 1
            if self._shared is not None:
                self._shared.update({**self._counts, **activity.counts}, seconds, self._next_step)

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics, as prometheus_client's collector protocol requires."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        self._count()
        with self._lock.lock:
            counts = {**self._counts, **activity.counts}
            buckets = {name: list(found) for name, found in self._buckets.items()}
            sums, next_step = dict(self._sums), self._next_step
        for name, (title, text) in _HISTOGRAMS.items():
            total, cumulative = 0, []
            for bound, count in zip((*map(str, _SECONDS), "+Inf"), buckets[name], strict=True):
                total += count
                cumulative.append((bound, float(total)))
            yield HistogramMetricFamily(title, text, buckets=cumulative, sum_value=sums[name])
        yield GaugeMetricFamily(*_NEXT_STEP, value=next_step)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"grain_sft_{name}", text, value=counts[name])
        read = CounterMetricFamily(_READ[0], _READ[1], labels=_READ[2])
        for name, store in _STORES.items():
            read.add_metric([store], counts[name])
        yield read


def _taken(values: list[float]) -> list[float]:
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

    def update(self, counts: dict[str, int], seconds: dict[str, list[float]], next_step: int) -> None:
        """Update the metrics; `counts` are totals, `seconds` only the values since the last update."""
        for name, values in seconds.items():
            for value in values:
                self._histograms[name].observe(value)
        for key, value in counts.items():
            if value != self._sent[key]:
                self._counters[key].inc(value - self._sent[key])
                self._sent[key] = value
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
