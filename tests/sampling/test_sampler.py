"""IndexSampler: laws that hold for every order, and exactness of the orders of other systems."""

import hashlib
import json
import pickle
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

from grain_sft import GrainSftError, Host, IndexSampler
from grain_sft.errors import SamplerError
from grain_sft.layout import FILL_ROW
from grain_sft.sampling import permute
from grain_sft.sampling.orders import ORDERS

GOLDEN = Path(__file__).parents[1] / "golden"
STRIPED = [order for order in ORDERS if order != "maxtext"]


def sampler(rows, batch, order, host=Host(0, 1), **options):
    return IndexSampler(rows, global_batch_size=batch, seed=options.pop("seed", 7), order=order, host=host, **options)


@pytest.mark.parametrize("order", STRIPED)
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8, 24])
def test_hosts_together_read_the_global_batch_in_stripes(order, hosts):
    whole = sampler(101, 24, order)
    for step in (0, 1, 3, 4, 11, 1_000_000_007):
        together = np.empty(24, np.int64)
        for index in range(hosts):
            together[index::hosts] = sampler(101, 24, order, Host(index, hosts)).rows(step)
        np.testing.assert_array_equal(together, whole.rows(step))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_row_is_read_once_an_epoch_by_all_hosts_together(order, hosts, epoch):
    rows, batch = 240, 24
    read = []
    for index in range(hosts):
        mine = sampler(rows, batch, order, Host(index, hosts))
        assert mine.steps_per_epoch == rows // batch
        read += [mine.rows(epoch * mine.steps_per_epoch + step) for step in range(mine.steps_per_epoch)]
    assert sorted(np.concatenate(read).tolist()) == list(range(rows))


@pytest.mark.parametrize("order", STRIPED)
def test_the_tail_of_an_epoch_is_dropped_and_nothing_else(order):
    mine = sampler(103, 10, order)
    read = np.concatenate([mine.rows(step) for step in range(mine.steps_per_epoch)])
    assert len(read) == 100
    assert len(set(read.tolist())) == 100


@pytest.mark.parametrize("order", STRIPED)
@pytest.mark.parametrize("hosts", [1, 2, 5])
def test_last_batch_fill_reads_every_row_once_and_fills_up(order, hosts):
    read = []
    for index in range(hosts):
        mine = sampler(103, 10, order, Host(index, hosts), last_batch="fill", epochs=1)
        assert mine.num_steps == 11
        read += [mine.rows(step) for step in range(11)]
        assert all(len(rows) == 10 // hosts for rows in read)
    read = np.concatenate(read).tolist()
    assert sorted(row for row in read if row != FILL_ROW) == list(range(103))
    assert read.count(FILL_ROW) == 7


def test_fill_serves_an_evaluation_set_smaller_than_a_batch():
    assert sorted(sampler(3, 8, "shuffle", last_batch="fill").rows(0).tolist()) == [-1] * 5 + [0, 1, 2]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("hosts", [1, 3])
def test_records_one_by_one_are_the_rows_of_the_steps(order, hosts):
    mine = sampler(50, 12, order, Host(hosts - 1, hosts))
    rows = np.concatenate([mine.rows(step) for step in range(13)])
    records = [mine[i] for i in range(len(rows))]
    assert [record.record_key for record in records] == rows.tolist()
    assert [record.index for record in records] == list(range(len(rows)))
    assert all(isinstance(record, grain.RecordMetadata) for record in records)


def test_filled_records_stay_fill_rows_where_grain_wraps_record_keys():
    mine = sampler(5, 4, "shuffle", last_batch="fill")
    keys = [mine[i].record_key % 5 for i in range(8)]
    assert keys.count(FILL_ROW) == 3


@pytest.mark.parametrize("order", ["shuffle", "olmo", "maxtext"])
def test_epochs_and_seeds_differ(order):
    epochs = [tuple(sampler(64, 64, order).rows(step).tolist()) for step in range(20)]
    assert len(set(epochs)) == 20
    seeds = [tuple(sampler(64, 64, order, seed=seed).rows(0).tolist()) for seed in range(20)]
    assert len(set(seeds)) == 20


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 256, 1000])
def test_shuffle_is_a_permutation_of_any_number_of_rows(rows):
    assert sorted(sampler(rows, rows, "shuffle").rows(3).tolist()) == list(range(rows))


@pytest.mark.parametrize("rows", [65_535, 65_536, 70_000, 200_000])
def test_shuffles_of_two_epochs_are_not_correlated(rows):
    """Rank correlation of the first 20,000 places, in units of its spread for independent shuffles."""
    places = 20_000
    mine = sampler(rows, places, "shuffle")
    first, second = mine.rows(0), mine.rows(mine.steps_per_epoch)
    assert len(set(first.tolist())) == places
    assert abs(np.corrcoef(first, second)[0, 1]) * np.sqrt(places) < 5


def test_shuffle_puts_a_row_anywhere():
    """Mean and spread of where row 0 lands over 300 epochs of 1,000 rows, as a uniform draw has them."""
    mine = sampler(1000, 1000, "shuffle")
    places = np.array([int(np.flatnonzero(mine.rows(epoch) == 0)[0]) for epoch in range(300)])
    assert abs(places.mean() - 499.5) < 4 * 288.7 / np.sqrt(300)
    assert 250 < places.std() < 330


@pytest.mark.parametrize("hosts", [2048, 1000])
def test_two_thousand_hosts_share_a_step_without_overlap(hosts):
    batch = hosts * 2
    read = [sampler(724_000_000, batch, "shuffle", Host(index, hosts)).rows(10_000_000) for index in range(hosts)]
    together = np.stack(read, axis=1).reshape(-1)
    assert len(set(together.tolist())) == batch
    np.testing.assert_array_equal(together, sampler(724_000_000, batch, "shuffle").rows(10_000_000))


def test_2048_hosts_read_every_row_once_an_epoch():
    hosts = 2048
    read = [
        sampler(8192, 4096, "olmo", Host(index, hosts)).rows(step) for index in range(hosts) for step in range(2, 4)
    ]
    assert sorted(np.concatenate(read).tolist()) == list(range(8192))


@pytest.mark.parametrize("case", json.loads((GOLDEN / "olmo_order.json").read_text())["cases"])
def test_order_olmo_is_the_order_of_olmo_core(case):
    if not case["batches"]:
        with pytest.raises(SamplerError, match=r"no full step|expected an integer"):
            sampler(case["N"], case["global_batch_size"], "olmo", seed=case["seed"])
        return
    for rank in range(case["ranks"]):
        mine = sampler(case["N"], case["global_batch_size"], "olmo", Host(rank, case["ranks"]), seed=case["seed"])
        assert mine.steps_per_epoch == len(case["batches"])
        first = (case["epoch"] - 1) * mine.steps_per_epoch
        for number, batch in enumerate(case["batches"]):
            assert mine.rows(first + number).tolist() == batch[rank]


@pytest.mark.parametrize("large", json.loads((GOLDEN / "olmo_order.json").read_text())["large"])
def test_a_large_olmo_order_is_olmo_cores(large):
    rows = sampler(large["N"], large["N"], "olmo", seed=large["seed"]).rows(large["epoch"] - 1)
    assert hashlib.sha256(rows.astype("<u4").tobytes()).hexdigest() == large["sha256"]


@pytest.mark.parametrize("case", json.loads((GOLDEN / "maxtext_order.json").read_text())["cases"])
def test_order_maxtext_is_the_order_of_maxtext(case):
    hosts, total = case["shard_count"], case["total_instances"]
    for index in range(hosts):
        shard = case["shards"][index]
        if not shard:
            with pytest.raises(SamplerError):
                sampler(total, hosts, "maxtext", Host(index, hosts), seed=case["seed"])
            continue
        mine = sampler(total, hosts, "maxtext", Host(index, hosts), seed=case["seed"])
        first = case["epoch"] * len(shard)
        assert [int(mine.rows(first + i)[0]) for i in range(len(shard))] == shard


def test_order_maxtext_runs_on_across_epochs_as_maxtext_does():
    records = json.loads((GOLDEN / "maxtext_order.json").read_text())["records"]
    hosts = records["shard_count"]
    for index, keys in enumerate(records["record_keys"]):
        mine = sampler(records["total_instances"], hosts * 4, "maxtext", Host(index, hosts), seed=records["seed"])
        assert [mine[i].record_key for i in range(len(keys))] == keys
        straddling = np.concatenate([mine.rows(step) for step in range(len(keys) // 4)])
        assert straddling.tolist() == keys[: len(straddling)]


def test_a_large_maxtext_permutation_is_maxtexts():
    large = json.loads((GOLDEN / "maxtext_order.json").read_text())["large"]
    rows = permute.maxtext(large["total_instances"], large["seed"], large["epoch"])
    assert hashlib.sha256(rows.astype("<i8").tobytes()).hexdigest() == large["sha256"]


def test_shuffle_false_reads_rows_as_they_are_numbered():
    assert sampler(20, 4, "olmo", Host(1, 2), shuffle=False).rows(2).tolist() == [9, 11]
    assert sampler(20, 4, "maxtext", Host(1, 2), shuffle=False).rows(2).tolist() == [14, 15]


def test_a_pickled_sampler_gives_the_same_rows_and_carries_no_permutation():
    mine = sampler(100_000, 8, "olmo", Host(1, 2))
    rows = mine.rows(5)
    pickled = pickle.dumps(mine)
    assert len(pickled) < 1000
    np.testing.assert_array_equal(pickle.loads(pickled).rows(5), rows)


def test_repr_says_what_decides_the_rows():
    assert repr(sampler(10, 2, "olmo")) == repr(sampler(10, 2, "olmo"))
    others = [sampler(11, 2, "olmo"), sampler(10, 5, "olmo"), sampler(10, 2, "shuffle"), sampler(10, 2, "olmo", seed=8)]
    others += [sampler(10, 2, "olmo", Host(1, 2)), sampler(10, 2, "olmo", shuffle=False)]
    assert len({repr(each) for each in [sampler(10, 2, "olmo"), *others]}) == 7


def test_length_is_endless_or_the_epochs():
    assert len(sampler(100, 10, "shuffle")) == sys.maxsize
    assert len(sampler(105, 10, "shuffle", Host(0, 2), epochs=3)) == 3 * 10 * 5
    with pytest.raises(IndexError):
        sampler(105, 10, "shuffle", epochs=3).rows(30)
    with pytest.raises(IndexError):
        sampler(105, 10, "shuffle", epochs=3)[300]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_instances": 0}, "num_instances=0"),
        ({"global_batch_size": 0}, "global_batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"epochs": 0}, "epochs=0"),
        ({"order": "olmoo"}, "olmoo.*shuffle, olmo"),
        ({"last_batch": "keep"}, "keep.*drop, fill"),
        ({"host": Host(0, 3)}, "global_batch_size=4 can't be divided by 3 hosts"),
        ({"num_instances": 3}, "no full step"),
        ({"order": "maxtext", "last_batch": "fill"}, "no last batch"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments, message):
    with pytest.raises(GrainSftError, match=message):
        IndexSampler(**{"num_instances": 100, "global_batch_size": 4, "seed": 0, **arguments})


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_host_out_of_range_is_an_error(index, count):
    with pytest.raises(GrainSftError, match=f"host index {index} of {count}"):
        Host(index, count)


def test_negative_steps_and_records_are_errors():
    with pytest.raises(IndexError, match="step=-1"):
        sampler(10, 2, "shuffle").rows(-1)
    with pytest.raises(IndexError, match="record=-1"):
        sampler(10, 2, "shuffle")[-1]


def test_uint64_permutations_from_four_billion_rows_on():
    assert permute.row_dtype(1 << 32) == np.uint32
    assert permute.row_dtype((1 << 32) + 1) == np.uint64
