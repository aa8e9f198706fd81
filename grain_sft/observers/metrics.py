"""Metrics: what a run has read and handed out so far, counted where Prometheus finds it.

They stand in prometheus_client's own registry, beside Grain's metrics, and whoever serves those serves these: Grain's
server, `prometheus_client.start_http_server`, or `start_server` here. Grain's wrappers are not used: they export only the
names that Grain lists, and drop all others without a word. Without prometheus_client there are only the totals that the
watchdog logs.

What happens with every batch is written down, and counted when someone looks: a dozen calls of prometheus_client take longer
than a small batch's copies. Where other processes look ($PROMETHEUS_MULTIPROC_DIR), it is counted at once.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.errors import MissingExtraError
from grain_sft.observers.tally import by_tally

if TYPE_CHECKING:
    from prometheus_client import Counter as Count
    from prometheus_client import Gauge, Metric

WRITTEN_DOWN = 1 << 10  # batches, at most
_SEVERAL = 8  # that are faster counted together
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
_FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


@dataclasses.dataclass(frozen=True)
class _Metrics:
    """The metrics; what each means stands in its text, which scrapes show too."""

    wait: Any  # Histograms
    make: Any
    rows: Count
    tokens: Count
    next_step: Gauge
    filtered_rows: Count
    local_bytes: Count
    remote_bytes: Count
    requests: Count
    retries: Count
    received_bytes: Count
    cache_hits: Count
    cache_misses: Count
    cache_fetched_bytes: Count

    def renew_locks(self) -> None:
        """Give all values new locks: a forked process has none of the threads that held the old ones."""
        for field in dataclasses.fields(self):
            metric: Any = getattr(self, field.name)
            for value in (getattr(metric, "_value", None), getattr(metric, "_sum", None), *_buckets(metric)):
                if hasattr(value, "_lock"):
                    value._lock = threading.Lock()


def _buckets(metric: Any) -> Sequence[Any]:
    found: Sequence[Any] = getattr(metric, "_buckets", ())
    return found


def _registered() -> _Metrics | None:
    """The metrics, made and registered; None without prometheus_client."""
    try:
        import prometheus_client  # which Grain has imported, where it is installed
    except ImportError:
        return None

    class Counted:
        """Up to date when it is collected."""

        def collect(self) -> Iterable[Metric]:
            count()
            found: Iterable[Metric] = super().collect()  # type: ignore[misc]
            return found

    class Count(Counted, prometheus_client.Counter):
        pass

    class Gauge(Counted, prometheus_client.Gauge):
        pass

    class Histogram(Counted, prometheus_client.Histogram):
        def observe_all(self, amounts: Sequence[float]) -> None:
            """`observe` of each. One by one, many take a hundred times as long, and its class has nothing else."""
            if len(amounts) < _SEVERAL:
                for amount in amounts:
                    self.observe(amount)
                return
            buckets: Any = self._buckets
            which = np.searchsorted(self._upper_bounds, amounts)
            for at, count in enumerate(np.bincount(which).tolist()):
                if count:
                    buckets[at].inc(count)
            self._sum.inc(sum(amounts))

    read = Count("grain_sft_read_bytes", "Bytes of rows that were read, by where their files are.", ["store"])
    return _Metrics(
        wait=Histogram("grain_sft_wait_seconds", "How long next() took, of each batch handed out.", buckets=_SECONDS),
        make=Histogram(
            "grain_sft_make_seconds", "How long each batch took to be made, by whichever thread.", buckets=_SECONDS
        ),
        rows=Count("grain_sft_rows", "Rows handed out."),
        tokens=Count("grain_sft_tokens", "Tokens handed out, padding included."),
        next_step=Gauge(
            "grain_sft_next_step", "The step whose batch is next handed out.", multiprocess_mode="mostrecent"
        ),
        filtered_rows=Count("grain_sft_filtered_rows", "Rows whose loss NgramFilter took off, of batches made."),
        local_bytes=read.labels("local"),
        remote_bytes=read.labels("remote"),
        requests=Count("grain_sft_remote_requests", "Requests for remote files, repeated ones included."),
        retries=Count("grain_sft_remote_retries", "Requests that failed and were made again."),
        received_bytes=Count("grain_sft_remote_received_bytes", "Bytes of remote files that came over the network."),
        cache_hits=Count("grain_sft_shard_cache_hits", "Blocks that the shard cache held when they were wanted."),
        cache_misses=Count("grain_sft_shard_cache_misses", "Blocks that it did not hold."),
        cache_fetched_bytes=Count("grain_sft_shard_cache_fetched_bytes", "Bytes fetched into the shard cache."),
    )


_metrics = _registered()
AT_ONCE = _FOLDER_VARIABLE in os.environ

_made: list[float] = []  # what is written down: seconds of each batch
handed_out: list[Any] = []
"""Of each batch that was handed out `HANDED_OUT` things, one after the other: when it was asked for and when it came, on
`time.perf_counter`'s clock, its step, rows and tokens, and its iterator's tally. Who adds them, at once, sees that they are
counted after `WRITTEN_DOWN` of them. (A tuple each would be garbage that Python's collector has to walk over.)"""
HANDED_OUT = 6
_read: list[int] = []  # bytes
_recent: deque[float] = deque(maxlen=256)  # seconds that each of the last batches took to be made
_counting = [threading.Lock()]


def count() -> None:
    """Count what was written down since this was called last."""
    with _counting[0]:
        made, handed, read = _taken(_made), _taken(handed_out), _taken(_read)
        since, came, steps, rows, tokens, tallies = (handed[field::HANDED_OUT] for field in range(HANDED_OUT))
        waited: list[float] = []
        for tally, of_tally in by_tally(tallies, [since, came, tokens]):
            waits = tally.add(*of_tally)
            waited += waits
            made += waits if tally.here else ()
        _recent.extend(made)
        if _metrics is None:
            return
        _metrics.make.observe_all(made)
        _metrics.wait.observe_all(waited)
        if steps:
            _metrics.rows.inc(sum(rows))
            _metrics.tokens.inc(sum(tokens))
            _metrics.next_step.set(steps[-1] + 1)
        if read:
            _metrics.local_bytes.inc(sum(read))


def mean_seconds_to_make() -> float | None:
    """Of the last batches that were made in this process; None: none was."""
    count()
    seconds = list(_recent)
    return sum(seconds) / len(seconds) if seconds else None


def _taken(written: list[Any]) -> list[Any]:
    """What is in `written`, which others add to meanwhile."""
    found = written[:]
    del written[: len(found)]
    return found


def _forked() -> None:
    """This is a new process: what was written down is the other's."""
    _counting[0] = threading.Lock()
    for written in (_made, handed_out, _read, _recent):
        written.clear()
    if _metrics is not None:
        _metrics.renew_locks()


os.register_at_fork(after_in_child=_forked)


def start_server(port: int = 9431, address: str = "127.0.0.1") -> int:
    """Serve this process's metrics, Grain's among them, at http://ADDRESS:PORT/metrics until it ends.

    With $PROMETHEUS_MULTIPROC_DIR set (before Python starts) those of all processes that write there, which worker
    processes are.

    Args:
      port: 0 for any that is free.
      address: "0.0.0.0" to be reached from other machines.

    Returns:
      The port.

    Raises:
      MissingExtraError: prometheus_client is not installed.
      OSError: the port is taken.
    """
    try:
        import prometheus_client
        from prometheus_client import multiprocess
    except ImportError as error:
        raise MissingExtraError.of("a server of metrics", "prometheus-client", "metrics") from error

    registry = prometheus_client.REGISTRY
    if _FOLDER_VARIABLE in os.environ:
        registry = prometheus_client.CollectorRegistry()
        multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    server, _ = prometheus_client.start_http_server(port, address, registry)
    return int(server.server_port)


def made(seconds: float) -> None:
    """A batch was made, here and now."""
    _made.append(seconds)
    if AT_ONCE or len(_made) > WRITTEN_DOWN:
        count()


def filtered(rows: int) -> None:
    """The loss was taken off so many rows."""
    if _metrics is not None:
        _metrics.filtered_rows.inc(rows)


def read_local(size: int) -> None:
    """So many bytes of rows are read from local files."""
    _read.append(size)
    if AT_ONCE or len(_read) > WRITTEN_DOWN:
        count()


def read_remote(size: int) -> None:
    """So many bytes of rows are read from remote files, or their cache."""
    if _metrics is not None:
        _metrics.remote_bytes.inc(size)


def requested() -> None:
    """A request for a remote file is made."""
    if _metrics is not None:
        _metrics.requests.inc()


def retried() -> None:
    """A request failed and is to be made again."""
    if _metrics is not None:
        _metrics.retries.inc()


def received(size: int) -> None:
    """So many bytes of a remote file came."""
    if _metrics is not None:
        _metrics.received_bytes.inc(size)


def cache_looked_up(hits: int, misses: int) -> None:
    """So many blocks were wanted of the shard cache, which held `hits` of them."""
    if _metrics is not None:
        _metrics.cache_hits.inc(hits)
        _metrics.cache_misses.inc(misses)


def cache_fetched(size: int) -> None:
    """So many bytes were fetched into the shard cache."""
    if _metrics is not None:
        _metrics.cache_fetched_bytes.inc(size)
