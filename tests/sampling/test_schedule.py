"""Batch sizes may change at a step. An epoch still has each row at most once, and any step can be computed alone."""

import pickle
import sys

import numpy as np
import pytest
from batches import examples, rows_of_hosts
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import Host, IndexSampler
from grain_sft.errors import SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling import MappedSampler, Mixture, MixtureSampler, SourceOrder, StagedSampler
from grain_sft.sampling.batch_sizes import BatchSizes, JoinedSizes

ORDERS = ("shuffle", "olmo", "episode", "openchat", "sequential")  # they accept every `last_batch`
SIZES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])


@st.composite
def runs(draw):
    """Draw arguments of an `IndexSampler`, with a schedule of batch sizes."""
    schedule, step = [], 0
    for _ in range(draw(st.integers(0, 4))):
        step += draw(st.integers(1, 9))
        schedule.append((step, draw(SIZES)))
    last_batch = draw(st.sampled_from(["drop", "fill", "run_on"]))
    rows = draw(st.integers(24 if last_batch == "drop" else 5, 90))
    options = {"last_batch": last_batch, "schedule": schedule, "order": draw(st.sampled_from(ORDERS))}
    return {"num_instances": rows, "global_batch_size": draw(SIZES), **options}


def rows_by_a_walk(num_instances, global_batch_size, last_batch, schedule, order, steps):
    """Return the rows of each step, computed one step after the other from a list of the rows left in the epoch."""
    epochs = IndexSampler(num_instances, global_batch_size=num_instances, seed=7, order=order)
    found, epoch, left = [], -1, []
    for step in range(steps):
        size = next((size for at, size in reversed(schedule) if step >= at), global_batch_size)
        if last_batch == "run_on":
            while len(left) < size:
                epoch += 1
                left += epochs.rows(epoch).tolist()
        elif len(left) < (size if last_batch == "drop" else 1):
            epoch += 1
            left = epochs.rows(epoch).tolist()
        found.append((left[:size] + [FILL_ROW] * size)[:size])  # with "fill", fewer than `size` rows may be left
        left = left[size:]
    return found


@settings(max_examples=examples(60))
@given(runs())
def test_rows_are_those_of_a_walk_through_all_epochs_from_the_first_row(run):
    sampler = IndexSampler(**run, seed=7)
    expected = rows_by_a_walk(**run, steps=25)
    assert [sampler.rows(step).tolist() for step in range(25)] == expected
    again = pickle.loads(pickle.dumps(sampler))
    assert again.rows(24).tolist() == expected[24] and repr(again) == repr(sampler)
    records = [sampler[number].record_key for number in range(sum(map(len, expected)))]
    assert records == [row for rows in expected for row in rows]
    for hosts in (2, 3):
        whole = IndexSampler(**{**run, "global_batch_size": 12}, seed=7)
        parts = [whole.with_host(Host(each, hosts)) for each in range(hosts)]
        for step in range(25):
            if whole.batch_sizes.at(step) % hosts:
                with pytest.raises(SamplerError, match="can't be divided"):
                    parts[0].rows(step)
            else:
                assert rows_of_hosts(parts, step).tolist() == whole.rows(step).tolist()


@settings(max_examples=examples(40))
@given(runs())
def test_a_run_ends_with_its_epochs_and_each_epoch_has_each_row_at_most_once(run):
    run["num_instances"] += 24
    sampler = IndexSampler(**run, seed=7, epochs=3)
    rows = [sampler.rows(step) for step in range(sampler.num_steps)]
    with pytest.raises(IndexError):
        sampler.rows(sampler.num_steps)
    slots = sampler.slots(range(sampler.num_steps), hosts=[0])
    assert slots.row.tolist() == np.concatenate(rows).tolist()
    for epoch in range(3):
        read = [row for row in slots.row[slots.epoch == epoch].tolist() if row != FILL_ROW]
        assert len(set(read)) == len(read)
        span = sampler.streams[0].span(epoch)
        steps = slots.step[slots.epoch == epoch]
        assert span == (steps.min(), steps.max(), len(read), 0)
        # An epoch leaves fewer rows unread than this number, by `last_batch`.
        unread = {"fill": 1, "drop": sampler.batch_sizes.at(span.last + 1), "run_on": run["num_instances"]}
        assert run["num_instances"] - len(read) < unread[run["last_batch"]]
    assert run["last_batch"] == "run_on" or sampler.steps_per_epoch == sampler.streams[0].span(0).last + 1
    back = sampler.find_slots(np.arange(run["num_instances"]), epochs=3, hosts=[0])
    real = slots.row != FILL_ROW
    for column, expected in zip(back.columns(), slots.columns(), strict=True):
        assert column.tolist() == expected[real].tolist()


def test_check_from_accepts_hosts_that_divide_all_batch_sizes_from_that_step_on():
    whole = IndexSampler(5000, global_batch_size=64, seed=3, order="olmo", schedule=[(1000, 96), (2000, 48)])
    six = whole.with_host(Host(0, 6))
    six.check_from(1000)
    with pytest.raises(SamplerError, match="global_batch_size=64, from step 999 on, can't be divided by 6 hosts"):
        six.check_from(999)
    with pytest.raises(SamplerError, match="can't be divided by 7 hosts: 1 of its rows would be left over"):
        whole.with_host(Host(0, 7))


def test_a_change_of_batch_size_continues_the_stream_of_order_maxtext():
    for host in (Host(0, 2), Host(1, 2)):
        steady = IndexSampler(40, global_batch_size=2, seed=3, order="maxtext", host=host)
        changing = IndexSampler(40, global_batch_size=4, seed=3, order="maxtext", host=host, schedule=[(5, 8), (9, 2)])
        rows = [row for step in range(20) for row in changing.rows(step).tolist()]
        assert rows == [int(steady.rows(step)[0]) for step in range(len(rows))]
        assert [changing[number].record_key for number in range(len(rows))] == rows
    with pytest.raises(SamplerError, match=r"start=\(0, 5\).*a multiple of 2"):
        IndexSampler(40, global_batch_size=2, seed=3, order="maxtext", host=Host(0, 2), start=(0, 5))


@settings(max_examples=examples(60))
@given(run=runs(), order=st.sampled_from(["shuffle", "olmo", "random", "maxtext", "sequential"]), data=st.data())
def test_a_sampler_that_reads_steps_in_turn_has_the_rows_of_a_new_sampler(run, order, data):
    if order in ("maxtext", "random") and run["last_batch"] == "fill":
        run["last_batch"] = "drop"
    run["order"] = order
    hosts = data.draw(st.sampled_from([1, 2, 4]))
    run["schedule"] = [(step, 4 * size) for step, size in run["schedule"]]
    run |= {"global_batch_size": 4 * run["global_batch_size"], "num_instances": 97 * run["num_instances"]}
    epochs = data.draw(st.sampled_from([None, 1, 3]))

    def make():
        return IndexSampler(**run, seed=3, host=Host(hosts - 1, hosts), epochs=None if order == "maxtext" else epochs)

    one, begin = make(), data.draw(st.integers(0, 40))
    end = begin + 150 if one.num_steps is None else min(begin + 150, one.num_steps)
    for step in range(begin, end):
        rows = one.rows(step)
        np.testing.assert_array_equal(rows, make().rows(step), err_msg=f"step {step}")
        rows[:] = -9  # the caller may write to its rows
    for step in (begin, begin + 3, begin + 2):
        if step < end:
            np.testing.assert_array_equal(one.rows(step), make().rows(step))


def test_joined_sizes_are_the_sizes_of_their_parts():
    sizes = JoinedSizes([(0, BatchSizes(4), 3), (5, BatchSizes(6, [(10, 12)]), 2)])
    expected = [4] * 5 + [6] * 3 + [12] * 12
    assert [sizes.at(step) for step in range(20)] == sizes.of_steps(np.arange(20)).size.tolist() == expected
    steps = np.repeat(range(20), expected)
    assert sizes.steps_of(np.arange(len(steps))).tolist() == steps.tolist() and sizes.before(20) == len(steps)
    sizes.check_from(5, 3)
    with pytest.raises(SamplerError, match="4 hosts"):
        sizes.check_from(5, 4)


def test_stages_list_the_steps_at_which_batches_change_and_ignore_steps_after_their_end():
    rows = SourceOrder(20, 1)
    mixture = Mixture({"a": (1, rows), "b": (1, rows)}, schedule=((10, {"a": 1, "b": 3}), (70, {"a": 3, "b": 1})))
    first = MappedSampler(MixtureSampler(mixture, global_batch_size=4, schedule=[(60, 3)]), end=50)
    last = MappedSampler(MixtureSampler(mixture, global_batch_size=4, schedule=[(5, 8)]), [(52, 2)], origin=50)
    run = StagedSampler([first, last])
    assert run.changes == [10, 50, 52, 53, 58, 118]
    run.with_host(Host(0, 4)).check_from(0)  # the 3 rows of step 60 are never read
    eight = last.with_host(Host(0, 8))  # 8 hosts divide the batches from step 53 on
    assert len(eight.rows(53)) == 1
    with pytest.raises(SamplerError, match="global_batch_size=4, from step 51 on, can't be divided by 8 hosts"):
        eight.check_from(51)
    with pytest.raises(SamplerError, match=r"stages: Host\(.*count=1\), Host\(.*count=8\); expected one host"):
        StagedSampler([first, eight])
    with pytest.raises(SamplerError, match="stages: no sampler; expected one host"):
        StagedSampler([])


def test_an_endless_run_that_starts_inside_an_epoch_counts_the_steps_to_the_end_of_that_epoch():
    assert IndexSampler(20, global_batch_size=4, seed=0, start=(3, 8)).steps_of_epochs(None) == 3
    rows = SourceOrder(20, 1, start=(3, 8))
    mixture = MixtureSampler(Mixture({"a": (1, rows), "b": (1, rows)}), global_batch_size=4)
    assert mixture.steps_of_epochs(None) == 6
    with pytest.raises(SamplerError, match="epochs=0"):
        mixture.steps_of_epochs(0)
    parts = {"a": (1, SourceOrder(40, 1, epochs=1)), "b": (3, SourceOrder(40, 2, epochs=2))}
    assert MixtureSampler(Mixture(parts, on_exhausted="renormalize"), global_batch_size=8).steps_of_epochs(2) == 15


def test_an_epoch_that_a_weight_of_0_leaves_unfinished_counts_the_rows_that_the_run_reads():
    sources = {name: (1, SourceOrder(40, 1)) for name in "ab"}
    sampler = MixtureSampler(Mixture(sources, schedule=((5, {"a": 1, "b": 0}),)), global_batch_size=4)
    assert sampler.streams[1].span(0) == (0, sys.maxsize, 10, 0)
    assert MappedSampler(sampler, [(0, 2), (1, 1)]).streams[1].span(0) == (0, sys.maxsize, 4, 4)
