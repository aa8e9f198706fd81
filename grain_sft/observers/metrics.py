"""Metrics of a run's reads and batches, for Prometheus.

The metrics are in prometheus_client's default registry, which Grain's own server and `start_server` in this module serve.
"""

from __future__ import annotations

import collections
import functools
import math
import os
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.arguments import as_integer, check_type
from grain_sft.errors import PipelineError, import_extra
from grain_sft.pipeline import MOST_UNCOUNTED, Arrival, Observer, count_batches, standing_observers
from grain_sft.storage import activity

if TYPE_CHECKING:
    from prometheus_client import Metric

SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Upper bounds of the histograms' buckets."""

# the keys of `_COUNTERS` and `_STORES` are names of counters in `activity`, to which all threads of this process add
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
_STORES = {"local_bytes": "local", "remote_bytes": "remote"}  # labels `store` of the counter grain_sft_read_bytes
_HISTOGRAMS = {"wait": "Time that next() took for each batch.", "make": "Time that a thread took to make each batch."}


class BulkHistogram:
    """Histogram that counts many values at once.

    prometheus_client's `Histogram` takes 4 us for each value, which is 5 % of the time of a small batch.
    """

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text
        self._counts = np.zeros(len(SECONDS) + 1, np.int64)  # the last bucket is for values above all bounds
        self._sum = 0.0

    def observe(self, values: Sequence[float]) -> None:
        """Add values, in seconds."""
        buckets = np.searchsorted(SECONDS, values)
        self._counts += np.bincount(buckets, minlength=len(self._counts))
        self._sum += sum(values)

    def collect(self) -> list[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        bounds = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(bounds, np.cumsum(self._counts).tolist(), strict=True))
        return [HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)]


class Metrics(Observer):
    """Observer that counts batches made and delivered, and exports the counters of `grain_sft.storage.activity`.

    Counting a batch takes longer than copying a small batch. So batches are counted about 1,000 at a time, and when `collect`
    is called. If $PROMETHEUS_MULTIPROC_DIR is set, each batch is counted immediately. Without prometheus_client, nothing is
    exported.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # a fork waits until no metric changes: otherwise the child could inherit a locked metric
        os.register_at_fork(before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._forked)
        self._counters: dict[str, Any] = {}
        self._exported = collections.Counter[str]()  # values of `activity.counts` at the last export or fork
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram  # Grain has already imported it
        except ImportError:
            return
        # Only this object is in the registry. The metrics are not (`registry=None`), because `collect` returns them.
        histogram: Any = BulkHistogram
        if not MOST_UNCOUNTED:  # $PROMETHEUS_MULTIPROC_DIR is set
            # only prometheus_client's histogram can write to that folder
            histogram = functools.partial(Histogram, buckets=SECONDS, registry=None)
        self._histograms = {kind: histogram(f"grain_sft_{kind}_seconds", text) for kind, text in _HISTOGRAMS.items()}
        text = "Step of the next batch to be handed out."
        self._next_step = Gauge("grain_sft_next_step", text, multiprocess_mode="mostrecent", registry=None)
        counter = functools.partial(Counter, registry=None)
        self._counters = {name: counter(f"grain_sft_{name}", text) for name, text in _COUNTERS.items()}
        read = counter("grain_sft_read_bytes", "Bytes of rows read from local or remote files.", ["store"])
        self._metrics = (*self._histograms.values(), self._next_step, *self._counters.values(), read)
        self._counters |= {name: read.labels(store) for name, store in _STORES.items()}
        REGISTRY.register(self)

    def _forked(self) -> None:
        """In a forked child, export only counts after the fork, because the parent exports the earlier counts."""
        self._exported = collections.Counter({name: activity.counts[name] for name in self._counters})
        self._lock.release()

    def batches_counted(self, make_seconds: Sequence[float], arrivals: Sequence[Arrival]) -> None:
        """Add rows and tokens to the counters, times to the histograms, and set the gauge of the next step."""
        if not self._counters:
            return
        # an `Arrival` is a tuple about one delivered batch; its first item, the iterator's `IteratorStats`, is not needed here
        _, steps, shapes, requested, arrived = zip(*arrivals, strict=True) if arrivals else ((),) * 5
        activity.count("rows", sum(shape[0] for shape in shapes))
        activity.count("tokens", sum(map(math.prod, shapes)))
        with self._lock:
            self._observe("make", make_seconds)
            self._observe("wait", np.subtract(arrived, requested).tolist())
            if steps:
                self._next_step.set(steps[-1] + 1)
        self._export_counts()

    def _observe(self, kind: str, seconds: Sequence[float]) -> None:
        histogram = self._histograms[kind]
        if isinstance(histogram, BulkHistogram):
            histogram.observe(seconds)
        else:
            for value in seconds:
                histogram.observe(value)

    def _export_counts(self) -> None:
        """Increase each counter by the growth of its `activity.counts` since the last call."""
        with self._lock:
            for name, counter in self._counters.items():
                value = activity.counts[name]
                if value != self._exported[name]:
                    counter.inc(value - self._exported[name])
                    self._exported[name] = value

    def collect(self) -> list[Metric]:
        """Return the current metrics. prometheus_client's registry calls this method."""
        count_batches()  # calls `batches_counted`
        self._export_counts()
        with self._lock:
            return [family for metric in self._metrics for family in metric.collect()]

    def describe(self) -> list[Metric]:
        """Return no metrics. Without this method, prometheus_client would call `collect` when it registers this object."""
        return []


of_process = functools.cache(Metrics)
"""Function that returns the metrics of all runs of this process."""


def start_server(port: int = 9431, address: str = "127.0.0.1") -> int:
    """Serve this process's metrics, including Grain's, at http://ADDRESS:PORT/metrics until the process ends.

    If $PROMETHEUS_MULTIPROC_DIR is set before Python starts, serve the metrics of all processes that write to that folder,
    including worker processes.

    Args:
      port: Port to listen on; 0 for any free port. The port is returned.
      address: Address to listen on; "0.0.0.0" to accept other machines.

    Raises:
      MissingExtraError: prometheus_client is not installed.
      OSError: Another program uses the port.
      PipelineError: `port` is not an integer from 0 to 65535.
    """
    port = as_integer("port", port, 0, PipelineError, 65535)
    check_type("address", address, str, "an address, such as '127.0.0.1'")
    prometheus_client = import_extra("prometheus_client", "a server of metrics", "prometheus-client", "metrics")
    standing_observers()  # makes the `Metrics` of this process, if no pipeline has made it yet
    registry = prometheus_client.REGISTRY
    if not MOST_UNCOUNTED:  # $PROMETHEUS_MULTIPROC_DIR is set
        from prometheus_client import multiprocess

        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    server, _ = prometheus_client.start_http_server(port, address, registry)
    return int(server.server_port)
