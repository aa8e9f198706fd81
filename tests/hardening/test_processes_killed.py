"""If a process is killed, terminated or forked while it reads, no row is wrong, nothing hangs, and no process is left behind.

This command kills more processes: GRAIN_SFT_KILLS=30 pytest -n0 tests/hardening/test_processes_killed.py
"""

import itertools
import multiprocessing
import os
import random
import re
import signal
from pathlib import Path

import pytest
from batches import pipeline_of
from children import is_right, run, start, wait_until, write_counted

from grain_sft import WindowLayout, open_corpus
from grain_sft.errors import PipelineError
from grain_sft.source import workers

KILLS = int(os.environ.get("GRAIN_SFT_KILLS", "1"))
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV)
STEPS_BETWEEN = 25


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("counted")
    write_counted(path, files=20, rows=200)
    return path


@pytest.fixture
def pipeline(folder):
    return pipeline_of(WindowLayout(open_corpus(folder, dtype="uint32"), 50), order="shuffle")


def workers_of(before):
    return sorted(set(multiprocessing.active_children()) - before, key=lambda worker: worker.pid)


def test_a_killed_worker_is_an_error_and_the_next_call_returns_its_step(pipeline):
    """Workers are killed at random steps. Every step still comes once, in order, with its own rows."""
    draw, before = random.Random(0), set(multiprocessing.active_children())
    iterator, errors = pipeline.iter(worker_count=min(KILLS, 2), prefetch=2), 0
    steps = [number * STEPS_BETWEEN + draw.randrange(1, STEPS_BETWEEN) for number in range(KILLS)]
    kill_at = dict(zip(steps, itertools.cycle(SIGNALS), strict=False))
    for step in range(KILLS * STEPS_BETWEEN):
        if step in kill_at:
            os.kill(draw.choice(workers_of(before)).pid, kill_at[step])
        try:
            batch = next(iterator)
        except PipelineError as error:
            assert f"a worker process was ended from outside while step {step} was awaited" in str(error)
            errors += 1
            batch = next(iterator)
        assert is_right(batch, pipeline.sampler.rows(step)), step
    assert errors, "no kill was noticed"
    iterator.close()
    assert wait_until(lambda: not workers_of(before))


def test_a_worker_that_is_killed_while_it_holds_a_lock_of_grain_is_an_error(pipeline, monkeypatch):
    """The test holds the lock instead of the worker. Grain waits for the lock when it stops the killed worker."""
    monkeypatch.setattr(workers, "_CLOSES_IN", 1)
    before, iterator = set(multiprocessing.active_children()), pipeline.iter(worker_count=2, prefetch=2)
    next(iterator)
    reader = next(each for each in workers._tree(iterator._from_workers.iterator) if hasattr(each, "_prefetch_process"))
    reader._prefetch_should_stop._cond.acquire()
    os.kill(reader._prefetch_process.pid, signal.SIGKILL)
    with pytest.raises(PipelineError, match=r"a worker process was ended from outside .* held a lock"):
        list(itertools.islice(iterator, 20))
    step = iterator.next_step
    assert is_right(next(iterator), pipeline.sampler.rows(step))
    iterator.close()
    assert wait_until(lambda: not workers_of(before))


@pytest.mark.heavy  # may hang: `grain.DataLoader` keeps waiting if the killed worker held a lock of Grain's
def test_a_data_loader_whose_worker_was_killed_raises_instead_of_skipping_a_step(pipeline):
    """Grain's own iterator would go on with the next step."""
    before = set(multiprocessing.active_children())
    iterator, steps = iter(pipeline.data_loader(worker_count=2)), itertools.count()
    for step in itertools.islice(steps, 4):
        assert is_right(next(iterator), pipeline.sampler.rows(step))
    os.kill(workers_of(before)[0].pid, signal.SIGKILL)
    with pytest.raises(PipelineError, match="a worker process was ended from outside"):
        for step in steps:
            assert is_right(next(iterator), pipeline.sampler.rows(step)), step
    for _ in range(2):
        with pytest.raises(PipelineError, match="going on would skip it"):
            next(iterator)
    assert wait_until(lambda: not workers_of(before))


READS = """
import multiprocessing
if __name__ == "__main__":
    pipeline = make(sys.argv[1])
    batches = iter(pipeline.data_loader(worker_count=2)) if sys.argv[2] == "loader" else pipeline.iter(worker_count=2)
    next(batches)
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    for _ in batches:
        time.sleep(0.002)
"""


def state_of(pid: int) -> tuple[str, int]:
    """Return the letter of a process's state and the pid of its parent, or ("Z", -1) if the process is gone."""
    try:
        letter, parent, *_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "Z", -1
    return letter, int(parent)


@pytest.mark.parametrize(("kind", "number"), [("iterator", signal.SIGTERM), ("loader", signal.SIGKILL)])
def test_a_process_that_is_ended_while_it_prefetches_leaves_no_process_and_no_shared_memory(folder, kind, number):
    child = start(READS, folder, kind)
    workers = [int(pid) for pid in child.stdout.readline().split()]
    assert len(workers) == 2, child.stderr.read() if child.poll() is not None else ""
    helpers = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and state_of(pid)[1] == child.pid]
    assert set(workers) <= set(helpers)
    shared = []
    while not shared:  # a worker maps the shared memory of a batch only while it writes the batch
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
        shared = re.findall(r"/dev/shm/psm_\w+", "".join(maps))
    child.send_signal(number)
    assert child.wait(300) == -number
    assert wait_until(lambda: all(state_of(pid)[0] == "Z" for pid in helpers)), "left behind"
    assert not [path for path in shared if os.path.exists(path)]
    child.communicate()


def reads_right(pipeline):
    return all(is_right(pipeline[step], pipeline.sampler.rows(step)) for step in range(20))


@pytest.mark.filterwarnings("ignore:.*fork.*")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pipeline_with_open_files_is_read_in_processes_of_every_start_method(pipeline, method):
    assert reads_right(pipeline)  # opens and maps the files
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.apply_async(reads_right, (pipeline,)).get(timeout=300)


FORKS = """
import faulthandler, threading
pipeline = make(sys.argv[1], max_open_files=4)
expected = pipeline[3]["inputs"].copy()

def spin(step):
    while True:
        pipeline[step]
        step += 1

for step in range(3):
    threading.Thread(target=spin, args=(100 * step,), daemon=True).start()
ends = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(200, exit=True)
        os._exit(0 if (pipeline[3]["inputs"] == expected).all() else 7)
    ends.append(os.waitpid(child, 0)[1])
print(ends.count(0), len(ends), flush=True)
os._exit(0)
"""


def test_a_process_that_was_forked_while_threads_read_can_read(folder):
    """The threads open files all the time, so some hold locks at a fork. The child must not wait for these locks."""
    forks = 30 * KILLS
    assert run(FORKS, folder, forks) == f"{forks} {forks}\n"
