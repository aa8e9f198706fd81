"""In order "balanced", the rows of a step have similar cost, and an epoch reads each row at most once."""

import functools
import pickle

import numpy as np
import pytest
from batches import examples, rows_of_hosts
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import Host, IndexSampler
from grain_sft.errors import SamplerError
from grain_sft.layout import FILL_ROW

# Rows of steps 2 and 7 of a run over 20 rows. No version of numpy or of this package may change them.
PINNED = [[6, 8, 14, 13], [0, 10, 18, 19]]


def heavy_tailed(rows):
    """Return the costs of `rows` rows. A few are many times as high as most."""
    return np.random.default_rng(rows).lognormal(20, 1, rows).astype(np.int64)


def sampler(rows, batch, **options):
    costs = functools.partial(heavy_tailed, rows)
    return IndexSampler(rows, global_batch_size=batch, seed=7, order="balanced", costs=costs, **options)


def most_over_mean(mine, steps):
    """Return for each of `steps` the highest cost of its rows, divided by their mean cost."""
    costs = heavy_tailed(mine.num_instances)
    return [costs[rows].max() / costs[rows].mean() for rows in map(mine.rows, steps)]


def test_the_rows_of_a_step_are_of_similar_cost():
    mine, shuffled = sampler(6400, 32), IndexSampler(6400, global_batch_size=32, seed=7)
    found = most_over_mean(mine, range(400))
    assert np.quantile(found, 0.95) < 1.1 and np.mean(most_over_mean(shuffled, range(400))) > 3
    heaviest = [int(heavy_tailed(6400)[mine.rows(step)].argmax()) for step in range(400)]
    assert 4 < np.mean(heaviest) < 27  # the rows of a step are not sorted
    assert np.corrcoef(found[:199], found[1:200])[0, 1] < 0.3  # the steps are not sorted either


def test_an_order_is_the_same_on_every_machine():
    assert sampler(20, 4).rows(2).tolist() == PINNED[0] and sampler(20, 4).rows(7).tolist() == PINNED[1]


@settings(max_examples=examples(60))
@given(
    rows=st.integers(24, 90),
    batch=st.sampled_from([2, 6, 12, 24]),
    schedule=st.dictionaries(st.integers(1, 20), st.sampled_from([6, 12, 24]), max_size=3),
    last_batch=st.sampled_from(["drop", "fill", "run_on"]),
)
def test_an_epoch_reads_each_row_at_most_once_for_any_batch_sizes_and_last_batch(rows, batch, schedule, last_batch):
    """All hosts together read the global batch.

    The rows of a step are neighbours if the rows of the epoch are sorted by cost, except with "run_on".
    """
    whole = sampler(rows, batch, schedule=sorted(schedule.items()), last_batch=last_batch, epochs=3)
    slots, costs = whole.slots(range(whole.num_steps)), heavy_tailed(rows)
    for epoch in range(3):
        mine = (slots.epoch == epoch) & (slots.row != FILL_ROW)
        read = slots.row[mine]
        assert len(set(read.tolist())) == len(read) == whole.streams[0].span(epoch).rows
        ranks_in_epoch = np.argsort(costs[read]).argsort()
        for step in np.unique(slots.step[mine]).tolist() if last_batch != "run_on" else ():
            ranks = ranks_in_epoch[slots.step[mine] == step]
            assert np.ptp(ranks) == len(ranks) - 1
    for step in {0, whole.num_steps // 2, whole.num_steps - 1}:
        for hosts in (1, 2, 3):
            if whole.batch_sizes.at(step) % hosts == 0:
                parts = [pickle.loads(pickle.dumps(whole.with_host(Host(each, hosts)))) for each in range(hosts)]
                assert rows_of_hosts(parts, step).tolist() == whole.rows(step).tolist()


def test_the_rows_that_an_epoch_leaves_out_are_of_any_cost():
    mine, costs = sampler(43, 8), heavy_tailed(43)
    epochs = [np.concatenate([*map(mine.rows, range(first, first + 5))]) for first in range(0, 300, 5)]
    unread = np.concatenate([np.setdiff1d(np.arange(43), read) for read in epochs])
    # Each of 60 epochs leaves out 3 of 43 rows. Their ranks by cost are spread evenly over 0 to 42.
    places = np.argsort(np.argsort(costs))[unread]
    assert len(places) == 180 and 17 < places.mean() < 25 and places.std() > 9


def test_costs_decide_the_receipt_and_are_required():
    mine = sampler(40, 8)
    other = IndexSampler(40, global_batch_size=8, seed=7, order="balanced", costs=lambda: np.ones(40, np.int64))
    assert mine.receipt != other.receipt and mine.data_key == sampler(40, 8).data_key
    of_three, floats = (lambda: np.ones(3, np.int64)), (lambda: np.ones(40))
    for costs, expected in ((None, "costs=layout"), (of_three, r"int64 of shape \[3\].* 40 rows"), (floats, "costs: float64")):
        with pytest.raises(SamplerError, match=expected):
            IndexSampler(40, global_batch_size=8, seed=7, order="balanced", costs=costs).rows(0)
    with pytest.raises(SamplerError, match="chunk_size=2: order 'balanced' arranges the rows of whole epochs"):
        sampler(40, 8, chunk_size=2)
    # Order "shuffle" ignores costs.
    IndexSampler(40, global_batch_size=8, seed=7, costs=lambda: np.ones(40), start=(0, 8))
