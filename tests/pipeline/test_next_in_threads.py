"""Threads that take batches from one iterator lose none, even if `next` raises an exception in one of them."""

import collections
import contextlib
import ctypes
import itertools
import random
import threading
import time

import numpy as np
import pytest
from batches import pipeline_of

from grain_sft import WindowLayout, open_corpus

pytestmark = pytest.mark.usefixtures("quiet_finalizers", "no_tracer")
LENGTH = 16


class Raised(BaseException):
    """The exception that the tests raise inside `next`."""


@pytest.fixture
def pipeline(write_tokens):
    """A pipeline with epochs of 50 steps. Token k of its corpus is k."""
    corpus = open_corpus(write_tokens("a.npy", np.arange(200 * LENGTH)), dtype="uint32")
    return pipeline_of(WindowLayout(corpus, LENGTH), order="shuffle")


def first(batch):
    return int(batch["inputs"][0, 0])


def firsts(pipeline, count):
    """Return the first token of each batch of steps 0 to `count` - 1."""
    return [int(pipeline.sampler.rows(step)[0]) * LENGTH for step in range(count)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_exceptions_that_another_thread_sets_lose_no_batch(pipeline, ahead):
    """`PyThreadState_SetAsyncExc` raises exceptions in two threads that share an iterator. Each step goes to one of them."""
    iterator, taken, ended = pipeline.iter(threads=ahead, prefetch=3), ([], []), [False, False]

    def take(number):
        while not ended[number]:
            with contextlib.suppress(Raised):
                while len(taken[0]) + len(taken[1]) < 400:
                    taken[number].extend(itertools.islice(iterator, 1))
                ended[number] = True

    def guarded(number):  # catches an exception that arrives outside of the `suppress` in `take`
        while not ended[number]:
            with contextlib.suppress(Raised):
                take(number)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    draw, sent = random.Random(0), collections.Counter()
    while any(thread.is_alive() for thread in threads):
        time.sleep(draw.uniform(0, 0.002))
        thread, num_taken = draw.choice(threads), len(taken[0]) + len(taken[1])
        # At most 5 exceptions between two batches. With more, the slow first call might never return.
        if sent[num_taken] < 5 and thread.is_alive() and not all(ended):
            sent[num_taken] += 1
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Raised))
    iterator.close()
    found = sorted(first(batch) for batch in (*taken[0], *taken[1]))
    assert found == sorted(firsts(pipeline, len(found)))


def test_a_batch_is_put_back_while_another_thread_makes_the_next(pipeline, monkeypatch):
    """The exception arrives when `next` releases its lock. The other thread is still making step 1 when step 0 is put back."""
    iterator, making, is_back, taken = pipeline.iter(threads=0), threading.Event(), threading.Event(), []
    other = threading.Thread(target=lambda: taken.append(next(iterator)))

    class Lock:
        def __enter__(self):
            pass

        def __exit__(self, *_):
            if other.ident is None:
                monkeypatch.setattr(iterator, "_make", lambda step: (making.set(), is_back.wait(), pipeline[step])[2])
                other.start()
                assert making.wait(60)
                raise Raised

    monkeypatch.setattr(iterator, "_lock", Lock())
    with pytest.raises(Raised):
        next(iterator)
    is_back.set()
    other.join()
    assert [first(batch) for batch in (next(iterator), *taken, next(iterator))] == firsts(pipeline, 3)
