"""Metrics: what a run has read and handed out, in the registry of prometheus_client.

Whoever serves that registry serves them: Grain's server, `prometheus_client.start_http_server`, or `start_server` here.
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
    """Observer that counts what is made and handed out, and the counters of `grain_sft.storage.activity`.

    There is one in a process. Batches are counted in Python and turned into metrics when prometheus_client collects them,
    because a dozen calls of prometheus_client take longer than the copies of a small batch. Where $PROMETHEUS_MULTIPROC_DIR has
    several processes write to one folder, prometheus_client's own counters are brought up to date after each batch. Without
    prometheus_client nobody collects.
    """

    def __init__(self) -> None:
        self._counts = {"rows": 0, "tokens": 0}
        self._next_step = 0
        self._last: Delivery | None = None
        self._buckets = {name: [0] * (len(_SECONDS) + 1) for name in _HISTOGRAMS}
        self._sums = dict.fromkeys(_HISTOGRAMS, 0.0)
        self._made: list[float] = []  # seconds of batches that are not counted yet
        self._handed_out: list[float] = []  # step, rows, tokens and seconds of each, one after the other: no garbage
        self._lock = ForkSafeLock()
        self._shared: _SharedMetrics | None = None
        try:
            import prometheus_client  # which Grain has imported, where it is installed
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
        if delivery is self._last:  # an exception interrupted its return
            return
        self._last = delivery
        self._handed_out.extend((delivery.step, delivery.rows, delivery.tokens, delivery.seconds))
        if self._shared is not None or len(self._handed_out) > 4 * _MOST_UNCOUNTED:
            self._count()

    def _count(self) -> None:
        """Count what was made and handed out since the last call."""
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
        """Yield the metrics as they are now, as prometheus_client asks for them."""
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
    """Remove and return what is in a list, to which other threads append meanwhile."""
    found = values[:]
    del values[: len(found)]
    return found


class _SharedMetrics:
    """prometheus_client's own counters, which it shares between processes."""

    def __init__(self) -> None:
        from prometheus_client import Counter, Gauge, Histogram

        self._histograms = {name: Histogram(*texts, buckets=_SECONDS) for name, texts in _HISTOGRAMS.items()}
        self._gauge = Gauge(*_NEXT_STEP, multiprocess_mode="mostrecent")
        self._counters: dict[str, Any] = {name: Counter(f"grain_sft_{name}", text) for name, text in _COUNTERS.items()}
        read = Counter(*_READ)
        self._counters |= {name: read.labels(store) for name, store in _STORES.items()}
        self._sent = dict.fromkeys(self._counters, 0)

    def update(self, counts: dict[str, int], seconds: dict[str, list[float]], next_step: int) -> None:
        """Add what was counted since the last update; `seconds` are only those since then."""
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
    """Serve this process's metrics, Grain's among them, at http://ADDRESS:PORT/metrics until it ends.

    With $PROMETHEUS_MULTIPROC_DIR set (before Python starts) those of all processes that write there, which worker
    processes are.

    Args:
      port: Port to listen on; 0 for any that is free.
      address: Address to listen on; "0.0.0.0" to be reached from other machines.

    Returns:
      The port.

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
