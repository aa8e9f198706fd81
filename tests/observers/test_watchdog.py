"""The watchdog: while a batch is late, the log names what the pipeline waits for."""

import gc
import os
import re
import threading
import time
from contextlib import closing

import grain
import pytest
from batches import take
from failing_proxy import before_emulator, media_bytes
from python_runs import run_python
from watched import BATCH, LENGTH, STALL, counting, make

from grain_sft.errors import CorpusFileError, PipelineError
from grain_sft.storage import cache_blocks, local_file


def once_logged(log, pattern, act):
    """Call `act`, in a thread, as soon as the log has `pattern`."""
    threading.Thread(target=lambda: (log.wait(pattern), act())).start()


class Holds(grain.transforms.Map):
    """A transform that holds each batch until the log has `pattern`."""

    def __init__(self, log, pattern):
        self._log, self._pattern = log, pattern

    def map(self, element):
        assert self._log.wait(self._pattern), self._log.lines
        return element


@pytest.mark.parametrize("threads", [0, 2])
def test_a_transform_that_hangs_is_named_while_it_hangs(folder, log, threads):
    names = r"Step 0: no batch after [\d.]+ s\.\n  .*: making step 0 for .* in the transform Holds"
    with closing(make(folder, Holds(log, names)).iter(threads=threads)) as batches:
        next(batches)
        assert log.find(names)
        assert log.wait(r"Step 0 came after \d+\.\d s")
        next(batches)
        time.sleep(3 * STALL)  # time that the training loop takes is not a stall
    assert not log.find("Step 2")


def test_a_stall_is_logged_again_after_twice_the_time_and_with_the_times_of_earlier_steps(folder, log):
    class Later(Holds):
        def map(self, element):
            return super().map(element) if element["inputs"][0, 0] == 2 * BATCH * LENGTH else element

    line = r"Step 2: no batch after (\d+\.\d) s\.\n.*in the transform Later.*\n"
    line += r"  earlier batches took \d.* to make, on average\n  earlier, the training loop took [23]\d\d ms a step"
    twice = rf"{line}(?s:.*){line}"
    with closing(make(folder, Later(log, twice)).iter(threads=0)) as batches:
        next(batches)
        time.sleep(0.2)
        next(batches)
        next(batches)
    ((first, again),) = log.find(twice)
    assert float(again) > float(first)


def test_a_shard_that_does_not_open_is_named(folder, log, monkeypatch):
    """Opening the file waits, as on a file system that hangs."""
    pipeline = make(folder)
    opened = threading.Event()
    monkeypatch.setattr(local_file, "open_regular", lambda path: -1 if opened.wait() else None)
    once_logged(log, f"opening {re.escape(str(folder / '0.npy'))}", opened.set)
    with pytest.raises(CorpusFileError):
        take(pipeline, 0, 1)
    assert log.find(r"grain_sft-read_\d: making step [01] for .* opening .*0\.npy")
    assert log.find(r"Step 0 failed after")


@pytest.fixture
def bucket(client, folder):
    """A proxy before a bucket, and the URL of the first file there."""
    client.pipe_file("bucket/0.npy", (folder / "0.npy").read_bytes())
    with before_emulator() as proxy:
        yield proxy, "gs://bucket/0.npy"


def test_a_server_that_does_not_answer_is_named_with_the_number_of_the_try(bucket, log):
    proxy, url = bucket
    pipeline = make([url])
    counts = counting("remote_retries_total", "remote_received_bytes_total")
    read = counting("read_bytes_total", store="remote")
    sentence = rf"waiting for bytes \d+ to \d+ of {url} for .* s, try \d+ \(the last failed with .*Try later"
    proxy.clear()
    proxy.refused = 1.0
    once_logged(log, sentence, lambda: setattr(proxy, "refused", 0.0))
    take(pipeline, 0, 1, threads=0)
    assert log.find(sentence), log.lines
    assert log.find(r"asking for \d+ parts of remote files")
    refused, received = proxy.failures["refused"], media_bytes(proxy)[0]
    found = counts()  # on a slow machine, an attempt may also end without an answer in time
    assert found["remote_retries_total"] >= refused > 0
    assert BATCH * LENGTH * 4 <= found["remote_received_bytes_total"] <= received
    assert read() == {"read_bytes_total": BATCH * LENGTH * 4}


def test_cache_reads_are_counted_and_the_process_that_holds_a_block_is_named(bucket, folder, log, tmp_path):
    _, url = bucket
    size = (folder / "0.npy").stat().st_size
    pipeline = make([url], remote={"cache": {"folder": str(tmp_path / "cache"), "max_bytes": "10MB", "unit": 32768}})
    counts = counting("shard_cache_hits_total", "shard_cache_misses_total", "shard_cache_fetched_bytes_total")
    pipeline[0]
    assert list(counts().values()) == [1, 1, size]  # a miss for the check of the file's ends, then a hit
    (block,) = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and "-" in path.name]
    block.unlink()
    once_logged(log, "downloads into the shard cache", cache_blocks.claim(str(block)).release)
    take(pipeline, 0, 1, threads=0)
    holder = f"which process {os.getpid()} downloads into the shard cache"
    assert log.find(rf"waiting for bytes 0 to {size} of {url}, {holder}"), log.lines


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
def test_a_variable_that_is_not_a_time_is_an_error(folder, monkeypatch, text):
    monkeypatch.setenv("GRAIN_SFT_STALL_SECONDS", text)
    with pytest.raises(PipelineError, match=r"\$GRAIN_SFT_STALL_SECONDS is .* expected seconds"):
        make(folder).iter()


def watchdog_runs(expected) -> bool:
    """Wait until a watchdog runs or, if `expected` is False, until none runs. Return False after 5 minutes."""
    end = time.monotonic() + 300
    while any(each.name == "grain_sft-watchdog" for each in threading.enumerate()) is not expected and time.monotonic() < end:
        gc.collect()  # earlier tests leave iterators in reference cycles
        time.sleep(0.05)
    return time.monotonic() < end


def test_no_watchdog_runs_if_stalls_are_not_logged(folder, monkeypatch):
    for stall in ("0", "1"):
        assert watchdog_runs(False)  # the watchdog of earlier iterators ends with them
        monkeypatch.setenv("GRAIN_SFT_STALL_SECONDS", stall)
        with closing(make(folder).iter(threads=0)) as batches:
            next(batches)
            assert watchdog_runs(stall == "1")


PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(lambda: print(time.time()))  # registered first, so it runs last
import grain
from grain_sft import IndexSampler, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus

class Sleeper(grain.transforms.Map):
    def map(self, batch):
        if batch["inputs"][0, 0] == 400:
            time.sleep(float(sys.argv[2]))
        return batch

source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1], dtype="uint32"), 50))
sampler = IndexSampler(len(source), global_batch_size=4, seed=3, order="sequential")
pipeline = Pipeline(source, sampler, [ShiftTargets(), Sleeper()])
"""


def script(folder, program, sleep=0.0, **environment):
    """Run PROGRAM and `program`. Return the lines, the stderr, and the seconds from the last line to the exit."""
    child = run_python("-c", PROGRAM + program + "print(time.time())", folder, sleep, **environment)
    *lines, last, end = child.stdout.splitlines()
    return lines, child.stderr, float(end) - float(last)


def test_a_script_ends_at_once_and_quietly_and_its_fork_is_watched_too(folder):
    program = """
batches = pipeline.iter()
for _ in range(3):
    next(batches)
if not os.fork():
    mine = pipeline.iter(start_step=1, threads=0)
    next(mine)
    end = time.monotonic() + 100
    while "grain_sft-watchdog" not in {thread.name for thread in threading.enumerate()} and time.monotonic() < end:
        time.sleep(0.01)
    os._exit(time.monotonic() > end)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    lines, errors, seconds = script(folder, program, GRAIN_SFT_STALL_SECONDS="30", PYTHONWARNINGS="ignore")
    assert (lines, errors) == (["0"], "")
    assert seconds < 20  # a wait for the watchdog would be 30


@pytest.mark.heavy
def test_a_slow_worker_process_is_named_by_parent_and_worker_and_is_counted(folder, tmp_path):
    program = """
import prometheus_client, prometheus_client.multiprocess
batches = pipeline.iter(worker_count=2, prefetch=1, threads=1)
for _ in range(4):
    next(batches)
batches.close()
registry = prometheus_client.CollectorRegistry()
prometheus_client.multiprocess.MultiProcessCollector(registry)
for name in ("grain_sft_rows_total", "grain_sft_wait_seconds_count"):
    print(registry.get_sample_value(name))
print(registry.get_sample_value("grain_sft_read_bytes_total", {"store": "local"}) >= 4 * 4 * 50 * 4)
"""
    (tmp_path / "counts").mkdir()
    environment = {"GRAIN_SFT_STALL_SECONDS": "0.3", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "counts")}
    lines, errors, _ = script(folder, program, 4.0, **environment)
    assert lines == ["16.0", "4.0", "True"]
    assert re.search(r"Step \d: no batch after .* s\.\n  worker process (\d+) makes it; \1 is ", errors), errors
    names = r"Worker process (\d+): no batch after .* s\.\n  .*: making step 2 for .*: in the transform Sleeper"
    assert re.search(names, errors), errors
