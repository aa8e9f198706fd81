"""Metrics count each delivered batch once. They are served to Prometheus and logged as a summary."""

import os
import re
import sys
import time
import types
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import prometheus_client
import pytest
from absl import logging as absl_logging
from batches import Applies, take
from watched import BATCH, LENGTH, ROWS, counted, counting, make

from grain_sft.errors import PipelineError, WrongTypeError
from grain_sft.observers import OBSERVERS, Observer, metrics
from grain_sft.pipeline import MOST_UNCOUNTED, counts
from grain_sft.storage import activity


@pytest.mark.parametrize(("threads", "named"), [(0, ()), (2, ()), (2, ("metrics", "watchdog"))])
def test_counters_count_each_delivered_row_once(folder, threads, named):
    pipeline = make(folder, observers=[OBSERVERS[name]() for name in named])
    counts = counting("rows_total", "tokens_total", "wait_seconds_count", "make_seconds_count", "filtered_rows_total")
    read = counting("read_bytes_total", store="local")
    waited, begin = counting("wait_seconds_sum"), time.perf_counter()
    with closing(pipeline.iter(threads=threads)) as batches:
        steps = [batch["inputs"].size for batch in batches]
    assert list(counts().values()) == [ROWS, sum(steps), len(steps), len(steps), 1]
    assert 0 < waited()["wait_seconds_sum"] < time.perf_counter() - begin
    assert read() == {"read_bytes_total": ROWS * LENGTH * 4}
    assert counted("next_step") == len(steps) == ROWS // BATCH


def test_each_batch_is_counted_once_while_threads_hand_out_batches_and_prometheus_collects(folder):
    counts = counting("wait_seconds_count", "make_seconds_count", "rows_total", "tokens_total")
    pipeline, rounds, threads = make(folder), 20, 4
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(threads) as pool:
            handing_out = [pool.submit(lambda: list(pipeline.iter(threads=0))) for _ in range(threads * rounds)]
            while not all(each.done() for each in handing_out):
                list(prometheus_client.REGISTRY.collect())
    finally:
        sys.setswitchinterval(interval)
    rows = rounds * threads * ROWS
    assert list(counts().values()) == [rows // BATCH, rows // BATCH, rows, rows * LENGTH]


def test_batches_that_are_not_counted_yet_stay_few(folder):
    with closing(make(folder, epochs=None).iter(threads=0)) as iterator:
        for _ in range(3 * MOST_UNCOUNTED):
            next(iterator)
            assert len(counts.arrivals) <= MOST_UNCOUNTED


@pytest.mark.parametrize("count_in_between", [False, True])
def test_a_batch_whose_delivery_is_interrupted_is_counted_once(folder, count_in_between):
    class Interrupts(Observer):
        def batch_handed_out(self, delivery):
            if not seen:
                seen.append(delivery)
                raise KeyboardInterrupt

    seen, counts = [], counting("rows_total")
    with closing(make(folder, observers=[Interrupts()]).iter(threads=0)) as iterator:
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        if count_in_between:
            assert iterator.stats.steps == 1
        next(iterator)
        assert iterator.stats.steps == 1 and counts() == {"rows_total": BATCH}


TORCH_LIKE = types.SimpleNamespace(shape=(BATCH, LENGTH), size=lambda: (BATCH, LENGTH))
MADE = {
    "a pair": (lambda batch: (batch["inputs"], batch["targets"]), 0),
    "nothing": (lambda batch: {}, 0),
    "a number": (lambda batch: {"loss": np.float32(1.0)}, 0),
    "pairs": (lambda batch: {"chosen_ids": batch["inputs"][:, :25], "rejected_ids": batch["targets"][:, 25:]}, BATCH),
    "another library's": (lambda batch: {"inputs": TORCH_LIKE}, BATCH),
}
"""A function that a transform calls, and the number of rows that are counted in its result."""


@pytest.mark.parametrize(("made", "rows"), MADE.values(), ids=MADE)
def test_whatever_a_transform_returns_is_counted_as_one_batch(folder, made, rows):
    counts = counting("wait_seconds_count", "rows_total", "tokens_total")
    take(make(folder, Applies(made)), 0, 1, threads=0)
    assert counts() == {"wait_seconds_count": 1, "rows_total": rows, "tokens_total": rows * LENGTH}


def test_the_metrics_server_serves_the_metrics_of_grain_sft_and_of_grain(folder):
    take(make(folder), 0, 1, threads=0)
    port = metrics.start_server(0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=300) as answer:
        text = answer.read().decode()
    found = re.search(r"^grain_sft_rows_total ([\d.e+]+)$", text, re.MULTILINE)
    assert found and float(found.group(1)) == counted("rows_total") >= BATCH
    assert "grain_python_dataset_prefetch_buffer_ready_count" in text


@pytest.mark.parametrize("port", [-1, 65536, "9431"])
def test_what_is_not_a_port_is_refused(port):
    with pytest.raises(PipelineError, match=f"port={port!r}: expected "):
        metrics.start_server(port)
    with pytest.raises(WrongTypeError, match="address is 5"):
        metrics.start_server(0, 5)


def test_a_forked_child_does_not_count_what_its_parent_has_not_counted_yet():
    before, status = counted("remote_retries_total"), 1
    activity.count("remote_retries", 7)
    if not (child := os.fork()):
        try:
            status = int(counted("remote_retries_total") - before)
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0 and counted("remote_retries_total") == before + 7


def test_a_bulk_histogram_has_the_buckets_of_prometheus_clients_histogram():
    values = [0.0, 0.0001, 0.00011, 0.3, 1.0, 1.5, 300.0, 301.0]
    one = metrics.BulkHistogram("x_seconds", "x")
    other = prometheus_client.Histogram("x_seconds", "x", buckets=metrics.SECONDS, registry=None)
    one.observe([])
    one.observe(values)
    for value in values:
        other.observe(value)
    found, expected = (next(iter(metric.collect())).samples for metric in (one, other))
    assert found == [sample for sample in expected if not sample.name.endswith("_created")]


@pytest.mark.parametrize("hidden", [False, True], ids=["INFO is logged", "absl hides INFO"])
def test_a_summary_is_logged_from_time_to_time(folder, log, monkeypatch, hidden):
    if hidden:  # as in a program that does not raise the verbosity
        monkeypatch.setattr(absl_logging, "level_info", lambda: False)
        monkeypatch.setattr(absl_logging, "info", lambda *_: None)
    monkeypatch.setenv("GRAIN_SFT_LOG_EVERY", "0.2")
    pattern = r"Steps? \d+ to \d+: \d+ tokens/s, [\d.]+ steps/s; waited .* a step, .* at most; the training loop"
    with closing(make(folder, epochs=None).iter(threads=0)) as batches:
        end = time.monotonic() + 300
        while not log.find(pattern) and time.monotonic() < end:
            next(batches)
            time.sleep(0.05)
    assert log.find(pattern)


def test_a_summary_before_the_first_batch_names_the_start_step(folder, log, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_LOG_EVERY", "0.1")
    with closing(make(folder, epochs=None).iter(start_step=1000, threads=0)):
        assert log.wait(r"No step in \d+ s; the next one is 1000\.")
