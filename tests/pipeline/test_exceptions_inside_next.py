"""After an exception at any moment inside `next`, the next call returns the step that is missing, and nothing hangs.

This command raises 5,000 exceptions, or the number in $GRAIN_SFT_EXCEPTIONS:

    pytest -n0 -m heavy -s tests/pipeline/test_exceptions_inside_next.py

`list.extend` takes the batches. It keeps a batch even if a signal handler raises directly after `next` returned it.
"""

import collections
import contextlib
import dis
import functools
import gc
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import warnings

import jax
import numpy as np
import pytest
from batches import pipeline_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import grain_sft
from grain_sft import WindowLayout, open_corpus
from grain_sft.errors import PipelineError
from grain_sft.integrations.jax_arrays import GlobalBatches
from grain_sft.pipeline.read_ahead import ReadAhead

COUNT = int(os.environ.get("GRAIN_SFT_EXCEPTIONS", "5000"))
LENGTH = 16
PACKAGE = os.path.dirname(grain_sft.__file__)
pytestmark = pytest.mark.usefixtures("quiet_finalizers", "no_tracer")
CALLS = ("CALL", "RESUME")  # prefixes of the names of bytecode instructions


class Raised(BaseException):
    """The exception that the tests raise inside `next`."""


@pytest.fixture
def pipeline(tmp_path, write_tokens):
    """A pipeline with an audit log and epochs of 50 steps. Token k of its corpus is k."""
    corpus = open_corpus(write_tokens("a.npy", np.arange(200 * LENGTH)), dtype="uint32")
    return pipeline_of(WindowLayout(corpus, LENGTH), run={"audit": tmp_path / "audit"}, order="shuffle")


def global_batches(pipeline, **options):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return GlobalBatches(pipeline, NamedSharding(mesh, PartitionSpec("data")), **options)


# Functions that make an iterator of a pipeline `p`.
KINDS = {
    **{f"{threads} threads": lambda p, threads=threads: p.iter(threads=threads, prefetch=3) for threads in range(5)},
    "1 worker": lambda p: p.iter(worker_count=1, prefetch=2),
    "2 workers": lambda p: p.iter(worker_count=2, prefetch=2),
    "global batches": global_batches,
    "global batches, not ahead": lambda p: global_batches(p, ahead=0),
}
TRACED_KINDS = ["0 threads", "2 threads", "global batches", "global batches, not ahead"]


def check_steps(pipeline, batches):
    """Check that the batches are those of consecutive steps from 0 on."""
    for step, batch in enumerate(batches):
        expected = np.asarray(pipeline.sampler.rows(step))[:, None] * LENGTH + np.arange(LENGTH)
        np.testing.assert_array_equal(np.asarray(batch["inputs"]), expected, err_msg=f"step {step}")


def check_log(pipeline, steps):
    """Check that the audit log has each begin and end of an epoch once, and no resumption."""
    with open(pipeline.audit.path + ".jsonl") as file:
        entries = [json.loads(line) for line in file]
    found = collections.Counter(entry["action"] for entry in entries)
    assert found["dataset_load"] == 1 and not found["resume"], found
    assert found["epoch_start"] == -(-steps // 50) and found["epoch_complete"] == steps // 50, found


@functools.cache
def signal_checks(code):
    """Return the offsets of the instructions at which CPython checks for signals: those after calls, and jumps back."""
    pairs = itertools.pairwise(dis.get_instructions(code))
    return {one.offset for before, one in pairs if before.opname.startswith(CALLS) or one.opname == "JUMP_BACKWARD"}


def raise_at(point):
    """Return a trace function that raises at check `point` in the package, and the list to which it then adds the place."""
    passed = itertools.count()
    reached = []

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_lasti in signal_checks(frame.f_code) and next(passed) == point:
            reached.append((frame.f_code.co_name, frame.f_lineno))
            sys.settrace(None)
            raise Raised
        return trace

    return trace, reached


def raise_at_checks(iterator, taken, stride, draw):
    """Call `next` until it returns a batch. Each call raises 1 to 2 * `stride` - 1 checks later than the one before.

    Return the number of the check at which the last call would have raised.
    """
    point = 0
    sys._getframe().f_trace_opcodes = True  # otherwise Python 3.12 reports no opcodes to the first trace
    while True:
        trace, reached = raise_at(point)
        step = len(taken)
        with contextlib.suppress(Raised):
            sys.settrace(trace)
            taken.extend(itertools.islice(iterator, 1))
        sys.settrace(None)
        assert iterator.next_step == len(taken), (point, reached)
        assert iterator.get_state()["next_step"] == len(taken)
        if not reached:
            assert len(taken) == step + 1
            return point
        point += draw.randint(1, 2 * stride - 1)


@pytest.mark.parametrize(
    ("before", "stride"),
    [(0, 9), (2, 3), *(pytest.param(before, 1, marks=pytest.mark.heavy) for before in (0, 2))],
    ids=["first call", "later calls", "all checks of first call", "all checks of later calls"],
)
@pytest.mark.parametrize("name", TRACED_KINDS)
def test_an_exception_at_any_check_for_signals_loses_and_repeats_nothing(pipeline, name, before, stride):
    """The first call of `next` starts threads and the audit log. Later calls may return a batch that a thread made before.

    Later calls run without an audit log. A repeated call would not write it again, and so would pass fewer checks.
    """
    iterator = KINDS[name](pipeline.replace() if before else pipeline)
    sys.settrace(raise_at(-1)[0])  # never raises; Python 3.13 reports opcodes only of code that was traced before
    taken = list(itertools.islice(iterator, before))
    sys.settrace(None)
    for _ in range(3 if before else 1):
        assert raise_at_checks(iterator, taken, stride, random.Random(name)) > (5 if before else 10)
    taken.extend(itertools.islice(iterator, 3))
    iterator.close()
    check_steps(pipeline, taken)
    if not before:
        check_log(pipeline, len(taken))


def interrupt(iterator, count, seed, taken, longest=0.002):
    """Take batches while a signal handler raises `count` exceptions inside `next`. Then take 5 more batches."""
    draw, raised, inside = random.Random(seed), 0, False

    def handler(number, frame):
        nonlocal inside
        if inside:
            inside = False
            raise Raised

    before = signal.signal(signal.SIGUSR1, handler)
    kill = (threading.main_thread().ident, signal.SIGUSR1)
    while raised < count:
        timer = threading.Timer(draw.uniform(0, longest) ** 2 / longest, signal.pthread_kill, kill)
        timer.start()
        try:
            inside = True
            taken.extend(itertools.islice(iterator, draw.randrange(1, 12)))
            inside = False
        except Raised:
            raised += 1
            if raised == 20:  # workers may still be starting, so wait for a batch
                taken.extend(itertools.islice(iterator, 1))
            assert getattr(iterator, "next_step", len(taken)) == len(taken)
        finally:
            inside = False
            timer.join()
        # copies, because each array of a worker process has two open files
        taken[-12:] = [{"inputs": np.array(batch["inputs"])} for batch in taken[-12:]]
    signal.signal(signal.SIGUSR1, before)
    taken.extend(itertools.islice(iterator, 5))


THOUSANDS = [pytest.param(name, -(-COUNT // len(KINDS)), marks=pytest.mark.heavy) for name in KINDS]


@pytest.mark.parametrize(("name", "count"), [("0 threads", 20), ("4 threads", 20), ("global batches", 20), *THOUSANDS])
def test_signal_handlers_that_raise_lose_and_repeat_nothing(pipeline, name, count):
    iterator, taken = KINDS[name](pipeline), []
    interrupt(iterator, count, name, taken)
    iterator.close()
    check_steps(pipeline, taken)
    check_log(pipeline, len(taken))
    print(f"\n{name}: {count} exceptions, {len(taken)} steps, each delivered once")


def test_a_wait_ends_if_a_signal_handler_closes_the_iterator():
    """The handler runs when `next` is about to wait for a step that no thread makes any more."""
    reader = ReadAhead(print, start=0, end=9, ahead=2, threads=1, name="test")
    reader.close()
    with pytest.raises(PipelineError, match=r"closed while step 1 was awaited\. Make another"):
        reader.get(1)


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("name", ["2 threads", "global batches"])
def test_threads_end_with_an_iterator_that_is_closed_or_collected(pipeline, name, close):
    before = set(threading.enumerate())
    iterator = KINDS[name](pipeline)
    next(iterator)
    mine = {thread for thread in set(threading.enumerate()) - before if "watchdog" not in thread.name}
    assert mine
    if close:
        iterator.close()
        with pytest.raises(PipelineError, match="closed"):
            next(iterator)
    else:
        del iterator
        gc.collect()
    while mine & {*threading.enumerate()}:  # a thread that is starting cannot be joined yet
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.heavy)])
def test_a_data_loader_stops_for_good_with_an_error(pipeline, workers):
    iterator, taken = iter(pipeline.replace().data_loader(worker_count=workers)), []
    with pytest.raises(PipelineError, match="going on would skip it"):
        interrupt(iterator, 1, workers, taken)
    check_steps(pipeline, taken)
    with pytest.raises(PipelineError, match="going on would skip it"):
        next(iterator)


def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent(pipeline):
    iterator = pipeline.iter()
    next(iterator)
    with warnings.catch_warnings(action="ignore"):  # JAX warns of any fork
        child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            list(iterator)
        except PipelineError as error:
            os._exit("forked" not in str(error))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    next(iterator)
    iterator.close()
