"""Worker processes start from any script. They end without a message when their iterator or the script ends."""

import functools
import multiprocessing
import queue
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import grain
import pytest
from batches import Applies, pipeline_of

from grain_sft import WindowLayout, open_corpus
from grain_sft.errors import PipelineError
from grain_sft.pipeline import Observer
from grain_sft.source import workers
from grain_sft.source.workers import InOrder

SCRIPT = """
import sys, weakref
weakref.finalize(weakref.finalize, int)  # an exit function that is registered before those of grain
import grain, numpy as np
from grain_sft import IndexSampler, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus

class Doubled(grain.transforms.Map):
    def map(self, element):
        return {"doubled": element["inputs"] * FACTOR}

FACTOR, left = 2, []  # `left` keeps iterators open

def train(of=lambda pipeline: pipeline.iter(worker_count=1)):
    source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 16))
    pipeline = Pipeline(source, IndexSampler(len(source), global_batch_size=4, seed=0), [ShiftTargets(), Doubled()])
    expected = [int(pipeline[step]["doubled"].sum()) for step in range(6)]
    iterator = of(pipeline)
    assert [int(next(iterator)["doubled"].sum()) for _ in range(6)] == expected
    left.append(iterator)
    print("the same", flush=True)
"""

# A script without an `if __name__ == "__main__"` guard.
PLAIN = SCRIPT + "train()\ntrain(lambda pipeline: iter(pipeline.data_loader(worker_count=1)))\n"
UNDER_ABSL = SCRIPT + textwrap.dedent("""
    from absl import app, flags
    flags.DEFINE_integer("steps", 1, "Steps.")
    def main(argv):
        assert flags.FLAGS.steps == 5
        train()
    if __name__ == "__main__":
        app.run(main)
""")
BEFORE_ABSL = SCRIPT + textwrap.dedent("""
    from absl import app, flags
    train()
    flags.DEFINE_integer("steps", 1, "Steps.")
    try:
        flags.FLAGS.steps
    except flags.UnparsedFlagAccessError:
        app.run(lambda argv: print(flags.FLAGS.steps))
""")
LEFT_THREADS = """
import sys
from grain_sft import IndexSampler, NpyDataSource, Pipeline, ShiftTargets, WindowLayout, open_corpus
source = NpyDataSource(WindowLayout(open_corpus(sys.argv[1]), 16))
pipeline = Pipeline(source, IndexSampler(len(source), global_batch_size=2, seed=1), [ShiftTargets()])
left = [pipeline.iter(start_step=step) for step in range(3)]
for batches in left:
    next(batches)
left[0].set_state(left[1].get_state())
"""


class SlowQueue(queue.Queue):
    """A queue whose readers wake up late, as on a busy machine."""

    def get(self, block=True, timeout=None):
        while block and not self.qsize():
            time.sleep(0.2)
        return super().get(block, timeout)


class Slow(grain.transforms.Map):
    def map(self, element):
        time.sleep(1)
        return element


class Once:
    """A data source that can be pickled for the first worker process only."""

    def __len__(self):
        return 99

    def __getitem__(self, index):
        return index

    def __reduce__(self):
        if multiprocessing.active_children():
            raise OSError("no more processes")
        return Once, ()


class Refuses(Observer):
    def __init__(self, error):
        self.error = error

    def batch_made(self, pipeline, step, seconds):
        raise self.error


def test_a_lock_in_a_batch_an_error_or_an_observer_is_not_sent_between_processes(write_tokens, monkeypatch):
    layout = WindowLayout(open_corpus(write_tokens("tokens.npy", range(600))), 16)
    error = ValueError("own")
    error.lock = threading.Lock()
    in_batch = pipeline_of(layout, [Applies(lambda batch: batch | {"lock": threading.Lock()})])
    in_error = pipeline_of(layout, run={"observers": [Refuses(error)]})
    with pytest.raises(PipelineError, match=r"Refuses can't be sent to worker processes: TypeError: .*_thread.lock"):
        next(in_error.iter(worker_count=1))
    monkeypatch.setattr(workers, "in_worker", lambda: True)
    for pipeline, sent in ((in_batch, r"\[<unlocked"), (in_error, r"\[ValueError\('own'\)\]")):
        with pytest.raises(PipelineError, match=rf"^step 3: a worker process can't send {sent}.*_thread.lock' object"):
            pipeline.dataset()[3]


def test_a_worker_ends_if_another_could_not_be_started():
    options = grain.MultiprocessingOptions(2, 1)
    elements = InOrder(grain.MapDataset.source(Once()).to_iter_dataset().mp_prefetch(options), 0)
    with pytest.raises(OSError, match="no more processes") as raised:
        elements.next(0)
    (worker,) = multiprocessing.active_children()
    elements.close()
    worker.join(200)
    assert worker.exitcode is not None and raised  # `raised` keeps the frames of the error alive


@pytest.mark.parametrize("seconds", [10, 0.3], ids=["in time", "late"])
def test_a_thread_that_waits_for_a_worker_ends_when_the_workers_do(monkeypatch, seconds):
    """The workers end in time or, as on a busy machine, after `close` has returned."""
    monkeypatch.setattr(workers, "_CLOSES_IN", seconds)
    monkeypatch.setattr(queue, "Queue", SlowQueue)
    dataset = grain.MapDataset.range(99).map(Slow()).to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(1, 1))
    elements, taken = InOrder(dataset, 0), threading.Event()

    def take():
        with pytest.raises(ValueError, match="closed"):
            for step in range(99):
                elements.next(step)
                taken.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert taken.wait(200)
    elements.close()
    thread.join(200)
    assert not thread.is_alive()


SCRIPTS = [
    pytest.param(UNDER_ABSL, ["--steps=5"], "the same\n", id="under absl.app"),
    pytest.param(BEFORE_ABSL, ["--steps=5"], "the same\n5\n", marks=pytest.mark.heavy, id="before absl.app"),
    pytest.param(PLAIN, None, "the same\nthe same\n", id="typed into a notebook, without a main file"),
    pytest.param(LEFT_THREADS, [], "", id="that leaves its iterators open"),
]


@pytest.mark.parametrize(("program", "arguments", "printed"), SCRIPTS)
def test_worker_processes_start_from_any_script_and_end_quietly(tmp_path, write_tokens, program, arguments, printed):
    write_tokens("tokens.npy", range(600))
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, timeout=400)
    (tmp_path / "script.py").write_text(program)
    if arguments is None:
        result = run([sys.executable, "-", "tokens.npy"], input=program)
    else:
        result = run([sys.executable, "script.py", "tokens.npy", *arguments])
    assert (result.returncode, result.stdout) == (0, printed), result.stderr
    assert "Traceback" not in result.stderr and (program is not LEFT_THREADS or not result.stderr), result.stderr


def test_workers_end_when_their_iterator_is_closed_and_next_then_raises(write_tokens):
    layout = WindowLayout(open_corpus(write_tokens("tokens.npy", range(600))), 16)
    before, iterator = set(multiprocessing.active_children()), pipeline_of(layout).iter(worker_count=1)
    next(iterator)
    mine = set(multiprocessing.active_children()) - before
    for _ in range(2):
        iterator.close()
    for process in mine:
        process.join(300)
    assert mine and not any(process.is_alive() for process in mine) and iterator.worker_pids() is None
    with pytest.raises(ValueError, match="closed"):
        next(iterator)
    other = pipeline_of(layout).iter(worker_count=1)
    with mock.patch("grain_sft.pipeline.iterator.ReadAhead.advance", lambda *_: other.close()):
        other.start_prefetch()  # returns, although no worker starts, because `close` was called meanwhile


def test_threads_that_close_one_iterator_together_close_it_once(write_tokens):
    observer = Observer()
    observer.iterator_closed = mock.Mock()
    layout = WindowLayout(open_corpus(write_tokens("tokens.npy", range(600))), 16)
    iterator = pipeline_of(layout, run={"observers": [observer]}).iter()
    threads = [threading.Thread(target=iterator.close) for _ in range(2)]
    with iterator._lock:  # as during a slow `next`
        for thread in threads:
            thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    observer.iterator_closed.assert_called_once_with(iterator)
