"""`IndexSampler` gives the rows that each host reads at each step, in every order."""

import functools
import pickle
import re
import sys

import grain
import numpy as np
import pytest
from batches import rows_of_hosts

from grain_sft import GrainSftError, Host, IndexSampler
from grain_sft.errors import RowIndexError, SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling import ORDERS, MappedSampler, Order, StepMap

# Orders in which host h of H reads rows h, h + H, h + 2H, ... of the global batch.
STRIPED = [order for order in ORDERS if order != "maxtext"]
# Rows at steps 0 and 1,000,000,000 in order "random", out of 504 rows. If they change, runs that resume get other rows.
PINNED = [[20, 275, 0, 94, 216, 451, 49, 219], [143, 22, 223, 476, 283, 136, 168, 474]]


def sampler(rows, batch, order, host=Host(0, 1), **options):
    if ORDERS[order].by_cost:
        options["costs"] = functools.partial(row_costs, rows)
    return IndexSampler(rows, global_batch_size=batch, seed=options.pop("seed", 7), order=order, host=host, **options)


def samplers(hosts, *arguments):
    return [sampler(*arguments, Host(index, hosts)) for index in range(hosts)]


def row_costs(rows):
    return np.random.default_rng(rows).integers(1, 1000, rows)


@pytest.mark.parametrize("order", STRIPED)
@pytest.mark.parametrize("hosts", [2, 3, 24])
def test_hosts_together_read_the_global_batch_in_stripes(order, hosts):
    whole, parts = sampler(101, 24, order), samplers(hosts, 101, 24, order)
    for step in (0, 1, 3, 4, 11, 1_000_000_007):
        np.testing.assert_array_equal(rows_of_hosts(parts, step), whole.rows(step))


def test_an_evaluation_set_may_be_smaller_than_a_batch():
    small = sampler(3, 8, "shuffle", last_batch="fill")
    assert sorted(small.rows(0).tolist()) == [FILL_ROW] * 5 + [0, 1, 2]
    assert small[7].record_key % 3 == FILL_ROW  # grain.DataLoader reads row `key % 3`


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("last_batch", ["drop", "fill", "run_on"])
def test_records_list_the_rows_step_by_step_for_every_last_batch(order, last_batch):
    if ORDERS[order].runs_on and last_batch == "fill":
        return
    # The case (7, 12, 5) has batches larger than an epoch.
    small = [] if last_batch == "drop" or order == "maxtext" else [(7, 12, 5)]
    for rows, batch, epochs in ((50, 12, 3), (100, 12, None), *small):
        for host in (Host(0, 1), Host(2, 3), Host(5, 12)):
            mine = sampler(rows, batch, order, host, last_batch=last_batch, epochs=epochs)
            steps = range(mine.num_steps or 30)
            expected = np.concatenate([mine.rows(step) for step in steps]).tolist()
            records = [grain.RecordMetadata(index=i, record_key=row) for i, row in enumerate(expected)]
            assert [mine[i] for i in range(len(expected))] == records
            places = np.random.default_rng(rows).permutation(batch // host.count)[: batch // 4]
            for step in steps:
                np.testing.assert_array_equal(mine.rows_at(step, places), mine.rows(step)[places])
            with pytest.raises(IndexError):
                mine.rows_at(0, np.array([batch]))


def test_order_random_draws_rows_with_replacement_from_seed_step_and_slot_alone():
    steps = [sampler(100, 50, "random").rows(step) for step in range(400)]
    counts = np.bincount(np.concatenate(steps), minlength=100)
    assert len(counts) == 100 and counts.sum() == 20_000
    # The sum has mean 99 and variance 2 * 99 (chi-squared with 99 degrees of freedom), if rows are uniform.
    assert ((counts - 200) ** 2 / 200).sum() < 99 + 5 * np.sqrt(2 * 99)
    assert any(len(set(rows.tolist())) < 50 for rows in steps[:3])
    mine = sampler(504, 8, "random", seed=1337)
    assert mine.rows(0).tolist() == PINNED[0] and mine.rows(10**9).tolist() == PINNED[1]
    assert sampler(504, 8, "random", seed=1338).rows(0).tolist() != PINNED[0]
    halves = [sampler(504, 4, "random", seed=1337).rows(step).tolist() for step in range(2)]
    assert halves[0] + halves[1] == PINNED[0]
    assert sampler(3, 8, "random").rows(5).max() <= 2  # a batch may be larger than the number of rows


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "sequential"])
def test_each_epoch_and_each_seed_has_another_order(order):
    mine = sampler(64, 64, order)
    assert len({tuple(mine.rows(step).tolist()) for step in range(20)}) == 20
    assert len({tuple(sampler(64, 64, order, seed=seed).rows(0).tolist()) for seed in range(20)}) == 20


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_000, 200_000])
def test_shuffles_of_two_epochs_are_not_correlated(rows):
    """Independent shuffles of n rows have correlations with standard deviation 1 / sqrt(n). The limit is 5 of these."""
    places = 20_000
    mine = sampler(rows, places, "shuffle")
    first, second = mine.rows(0), mine.rows(mine.steps_per_epoch)
    assert len(set(first.tolist())) == places
    assert abs(np.corrcoef(first, second)[0, 1]) * np.sqrt(places) < 5


@pytest.mark.parametrize("hosts", [2048, 1000])
def test_two_thousand_hosts_share_a_step_without_overlap(hosts):
    batch = hosts * 2
    together = rows_of_hosts(samplers(hosts, 724_000_000, batch, "shuffle"), 10_000_000)
    assert len(set(together.tolist())) == batch
    np.testing.assert_array_equal(together, sampler(724_000_000, batch, "shuffle").rows(10_000_000))


def test_slots_can_be_limited_to_those_that_some_hosts_read():
    read = IndexSampler(40, global_batch_size=8, seed=0, host=Host(0, 2))
    for hosts, expected in ((None, {0, 1}), ([1, 0], {0, 1}), ([0, 0], {0}), ([5, 6], set()), ([], set())):
        assert set(read.slots(range(2), hosts=hosts).host.tolist()) == expected
        assert set(read.find_slots(np.arange(40), hosts=hosts).host.tolist()) == expected


@pytest.mark.parametrize("last_batch", ["drop", "fill", "run_on"])
def test_reading_ahead_never_fails_for_an_epoch_that_was_not_requested(last_batch):
    """Epoch e has the seed `seed + e`, and RandomState takes seeds below 2^32. So the fourth epoch is an error."""
    rows, batch, seed = 10, 5, (1 << 32) - 3
    in_turn = sampler(rows, batch, "episode", seed=seed, last_batch=last_batch)
    single = sampler(rows, batch, "episode", seed=seed, last_batch=last_batch)
    for step in range(3 * rows // batch):
        np.testing.assert_array_equal(in_turn.rows(step), single.rows_at(step, np.arange(batch)))
    with pytest.raises(SamplerError, match="seed=4294967293, epoch 3"):
        in_turn.rows(3 * rows // batch)
    with pytest.raises(SamplerError, match=r"seed=4294967296, epoch 0: order 'episode' .* may be 0 to 4294967295"):
        sampler(10, 5, "episode", seed=1 << 32)


def test_shuffle_false_reads_rows_in_the_order_of_their_numbers():
    assert sampler(20, 4, "olmo", Host(1, 2), shuffle=False).rows(2).tolist() == [9, 11]
    assert sampler(20, 4, "maxtext", Host(1, 2), shuffle=False).rows(2).tolist() == [14, 15]
    with pytest.raises(SamplerError, match="shuffle='false': expected True or False"):
        sampler(20, 4, "olmo", shuffle="false")
    unused = {"seed": 1 << 40, "shuffle": False}  # without a shuffle, a seed that the order would refuse is not used
    assert sampler(5, 4, "episode", Host(1, 2), last_batch="run_on", **unused).rows(1).tolist() == [0, 2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("last_batch", ["drop", "run_on"])
def test_a_pickle_is_small_and_has_the_same_rows_at_late_steps(order, last_batch):
    mine = sampler(100_000, 12, order, Host(1, 3), last_batch=last_batch)
    step, pickled = 10**8 + 1, pickle.dumps(mine)
    rows = mine.rows(step).tolist()
    assert len(pickled) < 1000
    assert pickle.loads(pickled).rows(step).tolist() == rows and repr(pickle.loads(pickled)) == repr(mine)
    # An epoch of order maxtext is 33,333 rows of this host. Others drop 4 of 100,000 rows, except with "run_on".
    epoch = step * 4 // 33_333 if order == "maxtext" else step * 12 // (100_000 - 4 * (not mine.runs_on))
    assert mine.streams[0].begin(step)[0] == epoch
    assert [mine[step * 4 + i].record_key for i in range(4)] == rows
    other = mine.with_host(Host(2, 3))
    assert repr(other) == repr(sampler(100_000, 12, order, Host(2, 3), last_batch=last_batch))
    assert other.receipt == mine.receipt
    assert MappedSampler(other, [(1, 2)]).receipt == MappedSampler(mine, [(1, 2)]).receipt


def test_the_repr_contains_what_decides_the_rows():
    assert repr(sampler(10, 2, "olmo")) == repr(sampler(10, 2, "olmo"))
    made = [sampler(10, 2, order) for order in ORDERS]
    made += [sampler(11, 2, "olmo"), sampler(10, 5, "olmo"), sampler(10, 2, "olmo", Host(1, 2))]
    options = {"seed": 8}, {"shuffle": False}, {"last_batch": "run_on"}, {"epochs": 2}, {"schedule": [(9, 4)]}
    made += [sampler(10, 2, "olmo", **each) for each in options]
    assert len(set(map(repr, made))) == len(made)


WRONG_ARGUMENTS = [
    ({"num_instances": 0}, "num_instances=0"),
    ({"global_batch_size": 0}, "global_batch_size=0"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 1.5}, "seed=1.5"),
    ({"epochs": 0}, "epochs=0"),
    ({"order": "olmoo"}, "olmoo.*shuffle, olmo"),
    ({"last_batch": "keep"}, "keep.*drop, fill, run_on"),
    ({"host": (0, 1)}, r"host is \(0, 1\) .*expected Host\(index, count\)"),
    ({"host": Host(0, 3)}, "global_batch_size=4 can't be divided by 3 hosts"),
    ({"epochs": 1, "start": (1, 0)}, "is more than the 0 rows left in epochs=1. Take more epochs"),
    ({"num_instances": 3}, "no full step"),
    ({"num_instances": 3, "order": "episode", "last_batch": "run_on", "epochs": 1}, "3 rows left in epochs=1"),
    ({"order": "maxtext", "last_batch": "fill"}, "order 'maxtext' runs on across epochs and has no last batch"),
    ({"global_batch_size": 1 << 63}, r"at most 2\^62"),
    ({"schedule": [(1 << 61, 8)]}, r"rows up to step 2305843009213693952; expected at most 2\^62"),
    ({"start": (0, 100)}, "an index below 100"),
    ({"start": (0, 2.5)}, r"start=\(0, 2.5\): a number=2.5: expected an integer, 0 or more"),
    ({"schedule": [(0, 8)]}, "schedule: step=0: expected an integer, 1 or more"),
    ({"schedule": [(5, 8), (5, 16)]}, "step 5 follows step 5"),
    ({"schedule": [(5, 0)]}, "global_batch_size at step 5=0"),
    ({"schedule": [5]}, r"5; expected \(step, global_batch_size\)"),
    ({"schedule": [(5, 600)]}, "global_batch_size=600 is more than the 100 rows of an epoch"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(GrainSftError, match=message):
        IndexSampler(**{"num_instances": 100, "global_batch_size": 4, "seed": 0, **arguments})


WRONG_HOSTS = [((2, 2), "index 2 of 2"), ((-1, 2), "index=-1"), ((0, 0), "count=0: expected .* 1 or more")]


@pytest.mark.parametrize(("host", "message"), WRONG_HOSTS)
def test_hosts_out_of_range_are_errors(host, message):
    with pytest.raises(GrainSftError, match=f"host {message}"):
        Host(*host)


def test_steps_and_records_out_of_range_are_errors():
    assert len(sampler(100, 10, "shuffle")) == sys.maxsize
    ending = sampler(105, 10, "shuffle", Host(0, 2), epochs=3)
    assert len(ending) == 3 * 10 * 5
    for step in (-1, 30):
        with pytest.raises(IndexError, match=f"step={step}"):
            ending.rows(step)
    for steps in (range(-1, 2), range(29, 31)):
        with pytest.raises(IndexError, match=r"step=(-1|30)"):
            ending.slots(steps)
    for record in (-1, 150):
        with pytest.raises(IndexError, match=f"record={record}"):
            ending[record]
    with pytest.raises(RowIndexError, match=r"Slots are counted up to 2\^62 rows"):
        sampler(100, 10, "grain").slots(range(1 << 61, (1 << 61) + 1))
    with pytest.raises(IndexError, match="step=28: expected 0 to 27"):  # of the 30 steps, the map skips 2
        MappedSampler(ending, [(3, 2)]).slots(range(20, 29))


# Orders that are defined outside of the package. The tests below name them as "module:name". Some of them return wrong rows.


def rotated(seed, epoch, num_rows):
    return np.roll(np.arange(num_rows), seed + epoch)


def of_three_rows(seed, epoch, num_rows):
    return [None] * 3 if seed else [0, 1, 1]


BACKWARDS = Order.from_permutation(lambda seed, epoch, num_rows: np.arange(num_rows)[::-1], host_blocks=True)


def shifted(shift):
    return Order(lambda num_rows, *, seed, cache_dir: lambda epoch, indices: indices.astype(np.int16) + shift)


FROM_MINUS_ONE, FROM_ZERO, FROM_ONE, FLOATS = map(shifted, (-1, 0, 1, 0.0))
REPEATING = Order(lambda num_rows, *, seed, cache_dir: lambda epoch, indices: indices // 2)


def test_rows_that_do_not_exist_in_an_order_from_outside_are_an_error():
    assert sampler(80_000, 3, f"{__name__}:FROM_ZERO", chunk_size=4).rows(20_000).tolist() == [60_000, 60_001, 60_002]
    for order, step, expected in (
        ("FROM_MINUS_ONE", 0, "row -1 at index 0; expected 0 to 5"),
        ("FROM_ONE", 1, "row 6 at index 5"),
        ("FLOATS", 0, r"float64 of shape \[6\] for 6 indices"),
        ("REPEATING", 0, r"expected each of 6 rows once; found"),
    ):
        with pytest.raises(SamplerError, match=rf"order {__name__}:{order}, epoch 0: {expected}"):
            sampler(6, 3, f"{__name__}:{order}").rows(step)


def test_an_order_from_outside_is_named_by_its_module():
    mine = sampler(12, 4, f"{__name__}:rotated", seed=1, last_batch="run_on")
    assert mine.rows(0).tolist() == [11, 0, 1, 2] and mine.rows(3).tolist() == [10, 11, 0, 1]
    assert pickle.loads(pickle.dumps(mine)).rows(3).tolist() == [10, 11, 0, 1]
    blocks = sampler(12, 4, f"{__name__}:BACKWARDS", Host(1, 2), seed=1)
    assert "Host(index=0, count=2)" in blocks.receipt
    assert [blocks.rows(step).tolist() for step in range(4)] == [[5, 4], [3, 2], [1, 0], [5, 4]]
    found = blocks.slots(range(3))
    assert (found.row == 11 - found.index).all() and sorted(found.row.tolist()) == list(range(12))
    for seed, message in ((0, "expected each of 3 rows once"), (1, "TypeError: .* Expected a function")):
        with pytest.raises(SamplerError, match=f"epoch 0: {message}"):
            sampler(3, 1, f"{__name__}:of_three_rows", seed=seed).rows(0)
    for name in ("no_such.module:name", ".computed:name", ":name"):
        with pytest.raises(SamplerError, match=f"'{re.escape(name)}' cannot be imported"):
            sampler(3, 1, name)


SKIPS = [(0, [(0, 3), (5, 2), (5, 1)]), (20, []), (20, [(3, 5), (20, 1), (31, 4)])]


@pytest.mark.parametrize(("origin", "skips"), SKIPS)
def test_a_step_map_reads_every_data_step_once_or_skips_it(origin, skips):
    steps = range(origin, origin + 40)
    skipped_before = [sum(count for first, count in skips if max(first, origin) <= step) for step in steps]
    read = [step - origin + skipped for step, skipped in zip(steps, skipped_before, strict=True)]
    data = np.arange(read[-1] + 1)
    found = StepMap(skips, origin)
    assert [found.data_step(step) for step in steps] == read and found.data_step(origin - 1) == read[0] - 1
    assert found.steps_of(data).tolist() == [steps[read.index(each)] if each in read else -1 for each in data.tolist()]
    assert [step for data_steps in found.read_between(0, len(data)) for step in data_steps] == read


@pytest.mark.parametrize(("skips", "origin"), [([(0, 10**30)], 0), ([(10**30, 1)], 0), ([], 10**30)])
def test_a_step_beyond_int64_is_an_error(skips, origin):
    with pytest.raises(SamplerError, match=r"^step \d+: .* Skip fewer steps, or shorten a stage"):
        StepMap(skips, origin)
