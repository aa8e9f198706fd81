"""Closing an iterator from several threads."""

import threading
import time

import numpy as np
from batches import pipeline_of

from grain_sft import Pipeline, WindowLayout, open_corpus
from grain_sft.pipeline import Observer


def test_threads_that_close_an_iterator_at_once_close_it_once(write_tokens):
    closed = []

    class Observed(Observer):
        def iterator_closed(self, iterator):
            closed.append(iterator)

    layout = WindowLayout(open_corpus(write_tokens("a.npy", np.arange(800)), dtype="uint32"), 50)
    mine = pipeline_of(layout)
    iterator = Pipeline(mine.source, mine.sampler, mine.transforms, observers=[Observed()]).iter()
    threads = [threading.Thread(target=iterator.close) for _ in range(2)]
    with iterator._lock:  # as during a slow `next`
        for thread in threads:
            thread.start()
        time.sleep(0.1)
    for thread in threads:
        thread.join()
    assert closed == [iterator]
