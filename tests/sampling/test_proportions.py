"""`Proportions` keeps each source of a mixture near its share after every row. A late row takes no longer than the first."""

import gc
from fractions import Fraction

import numpy as np
import pytest
from batches import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grain_sft.errors import GrainSftError, SamplerError
from grain_sft.sampling import Mixture, SourceOrder, proportions
from grain_sft.sampling.proportions import Proportions, as_shares

WEIGHT = st.one_of(st.integers(0, 12), st.sampled_from([1, 500, 999]))  # 1 and 999 are 0.001 and 0.999, times 1,000


def shares(*weights):
    return as_shares([(str(number), weight) for number, weight in enumerate(weights)])


def weights_of(low, high):
    return st.lists(WEIGHT, min_size=low, max_size=high).filter(any)


def constant(*weights):
    """Return proportions of weights that never change and of sources that never end."""
    return Proportions([(0, shares(*weights))], [None] * len(weights))


def largest_distances(changes, chosen):
    """Return after each row the largest distance of a source from its share, in rows, as a Fraction.

    `changes` is pairs (row, shares from that row on). `chosen` is the source of each row.
    """
    by_row = dict(changes)
    common = np.lcm.reduce([share.denominator for each in by_row.values() for share in each])
    owed, weights, found = [0] * len(by_row[0]), (), []
    for row, source in enumerate(chosen.tolist()):
        if row in by_row:
            weights = [int(share * common) for share in by_row[row]]
        owed = [debt + weight for debt, weight in zip(owed, weights, strict=True)]
        owed[source] -= int(common)
        found.append(Fraction(max(map(abs, owed)), int(common)))
    return found


def assert_consistent(mixed, rows):
    """Return the sources of the first `rows` rows. Check that `choose`, `counts` and `find` agree on them."""
    numbers = np.arange(rows)
    sources, before = mixed.choose(numbers)
    for source, count in enumerate(mixed.counts(rows)):
        mine = numbers[sources == source]
        assert len(mine) == count
        assert before[sources == source].tolist() == list(range(count))
        assert mixed.find(source, np.arange(count)).tolist() == mine.tolist()
    backwards = np.arange(rows - 1, -1, -3)
    assert mixed.choose(backwards)[0].tolist() == sources[backwards].tolist()
    return sources


@pytest.mark.parametrize(("weights", "rows"), [((3, 70_001, 29_996), 100_000), ((1, 7, 2), 10_000)])
def test_every_prefix_of_many_rows_is_within_tijdemans_bound(weights, rows):
    """For three sources, Tijdeman's bound is 0.75 rows: no source is ever further from its share."""
    mixed, period = constant(*weights), sum(weights)
    sources = assert_consistent(mixed, rows)
    for source, weight in enumerate(weights):
        assert np.abs(period * np.cumsum(sources == source) - weight * np.arange(1, rows + 1)).max() <= 0.75 * period
    assert mixed.bound == 0.75
    assert period > 10 or sources[:20].tolist() == [1, 1, 2, 1, 1, 0, 1, 1, 2, 1] * 2


@settings(max_examples=examples(60))
@given(weights_of(2, 8))
def test_no_source_is_a_row_away_from_its_share_and_none_beyond_tijdemans_bound(weights):
    mixed = constant(*weights)
    rows = min(int(np.lcm.reduce([share.denominator for share in shares(*weights)])), 600)
    sources = assert_consistent(mixed, rows)
    worst = max(largest_distances([(0, shares(*weights))], sources))
    assert worst < 1
    assert float(worst) <= mixed.bound + 1e-12
    for source, share in enumerate(shares(*weights)):
        assert share or not (sources == source).any()


@settings(max_examples=examples(40))
@given(weights_of(2, 4), st.integers(0, 10**12))
def test_in_a_halving_tree_up_to_four_sources_stay_within_a_row_of_their_share(weights, first):
    """Without a table of rows (`ScheduleTable`), a `HalvingTree` chooses the sources."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proportions, "TABLE_ROWS", 0)
        mixed = constant(*weights)
        assert mixed.bound <= 1
        sources = assert_consistent(mixed, 300)
    assert max(largest_distances([(0, shares(*weights))], sources)) < 1
    rows = np.arange(first, first + 50)
    late, before = mixed.choose(rows)
    for source in np.unique(late).tolist():
        assert mixed.find(source, before[late == source]).tolist() == rows[late == source].tolist()
    counts = mixed.counts(first)
    assert sum(counts) == first
    assert all(abs(count - first * share) <= 1 for count, share in zip(counts, shares(*weights), strict=True))


@pytest.mark.parametrize(("tries", "seed"), [(69, 0), pytest.param(4600, 1, marks=pytest.mark.heavy)])
def test_in_a_halving_tree_up_to_24_sources_stay_within_the_stated_bound(tries, seed):
    """Weights have many digits. They are similar, or differ by some orders of magnitude, or are a geometric series."""
    random, rows, found = np.random.default_rng(seed), 2000, 0.0
    for number in range(tries):
        count = 2 + number % 23
        even, skewed = random.random(count) + 0.01, random.random(count) ** 6 + 1e-6
        series = 2.0 ** -np.arange(count) * random.uniform(0.8, 1.2, count)
        weights = (even, skewed, series)[int(random.integers(3))]
        weights = tuple(np.maximum(1, weights / weights.sum() * 10**12).astype(np.int64).tolist())
        mixed = constant(*weights)
        sources, _ = mixed.choose(np.arange(rows))
        counts = (sources[:, None] == np.arange(count)).cumsum(axis=0)
        owed = np.arange(1, rows + 1)[:, None] * np.array(weights) - counts * sum(weights)  # exact: below 2^63
        worst = float(np.abs(owed).max() / sum(weights))
        assert worst <= mixed.bound < 2
        assert mixed.bound <= (1 if count <= 4 else 1.2 if count <= 10 else 2)
        found = max(found, worst)
    assert found > 1  # unlike a table, a tree does not promise less than one row


def test_a_halving_tree_leaves_no_arrays_to_the_garbage_collector():
    mixed = constant(10**12 + 1, 10**12, 5)
    gc.collect()
    gc.disable()
    try:
        mixed.choose(np.arange(100))
        assert not gc.collect()
    finally:
        gc.enable()


def test_a_late_row_takes_no_longer_than_the_first():
    """Row 10^15 is found from the table of one period, which is 10 rows. A walk over all rows before it would not end."""
    mixed = constant(0.1, 0.7, 0.2)
    for row in (0, 10**9, 10**15):
        sources, numbers = mixed.choose(np.arange(row, row + 10))
        assert np.bincount(sources, minlength=3).tolist() == [1, 7, 2]
        assert numbers[sources == 1].tolist() == list(range(row // 10 * 7, row // 10 * 7 + 7))
        assert mixed.counts(row) == [row // 10, row // 10 * 7, row // 10 * 2]


@st.composite
def scheduled(draw, low, high):
    """Draw changes of the weights of `low` to `high` sources, and a row after the last change."""
    count = draw(st.integers(low, high))
    changes, row = [], 0
    for _ in range(draw(st.integers(2, 5))):
        changes.append((row, shares(*draw(weights_of(count, count)))))
        row += draw(st.integers(1, 40))
    return changes, row


LATE = [
    (0, shares(0, 0, 1, 250)),
    (7, shares(0, 0, 0, 1)),
    (8, shares(250, 499.5, 499.5, 0)),
    (12, shares(1, 500, 0, 500)),
    (13, shares(0, 0, 0, 1)),
]
"""Changes of weights. Two of them last for one row. That row must have the same source as if they lasted longer."""


@settings(max_examples=examples(60))
@given(scheduled(2, 3) | scheduled(4, 8))
@example((LATE, 14))
def test_a_change_of_weights_changes_no_earlier_row_and_up_to_three_sources_stay_within_a_row_of_their_share(found):
    changes, row = found
    count = len(changes[0][1])
    sources = assert_consistent(Proportions(changes, [None] * count), row + 100)
    for number in range(1, len(changes)):
        fewer, at = Proportions(changes[:number], [None] * count), changes[number][0]
        assert fewer.choose(np.arange(at))[0].tolist() == sources[:at].tolist()
    worst = max(largest_distances(changes, sources))
    assert (worst <= 1) if count <= 3 else (worst < len(changes))


def test_a_source_that_no_rule_can_keep_within_a_row_of_its_share_returns_to_it_soon():
    """Three of six equal sources have had a row each. From then on, these three have a low weight.

    One of the other three falls more than a row behind for a while. If the low weight is 0, it stays behind.
    """
    equal = [(0, shares(1, 1, 1, 1, 1, 1))]
    first = Proportions(equal, [None] * 6).choose(np.arange(3))[0]
    for little, back in ((1, 60), (0, None)):
        changes = [*equal, (3, shares(*(little if source in first else 20 for source in range(6))))]
        off = largest_distances(changes, Proportions(changes, [None] * 6).choose(np.arange(300))[0])
        assert 1 < max(off) <= Fraction(7, 6)
        assert back is None or max(off[back:]) <= 1


def test_an_exhausted_source_leaves_its_share_to_the_others():
    changes, limits = [(0, shares(0.1, 0.7, 0.2))], [5, None, 3]
    endless = constant(0.1, 0.7, 0.2)
    renormalized = Proportions(changes, limits, ["renormalize"] * len(limits))
    sources = assert_consistent(renormalized, 400)
    assert renormalized.length is None and np.bincount(sources).tolist() == [5, 392, 3]
    last = int(renormalized.find(2, np.array([2]))[0])
    assert sources[: last + 1].tolist() == endless.choose(np.arange(last + 1))[0].tolist()


def test_tables_end_soon_after_a_source_is_exhausted(calls_of):
    tables = calls_of(proportions, "ScheduleTable")
    mixed = Proportions([(0, shares(0.200001, 0.3, 0.499999))], [50, 60, 70], ["renormalize"] * 3)
    assert mixed.length == 180 and max(num_rows for _, _, num_rows in tables) < 300


@settings(max_examples=examples(60))
@given(weights_of(2, 6), st.data())
def test_with_renormalize_every_row_of_every_source_is_read_once(weights, data):
    limits = [data.draw(st.integers(0, 30)) if weight else 0 for weight in weights]
    mixed = Proportions([(0, shares(*weights))], limits, ["renormalize"] * len(limits))
    assert mixed.length == sum(limits)
    assert mixed.counts(mixed.length) == limits
    assert_consistent(mixed, mixed.length)


@settings(max_examples=examples(60))
@given(weights_of(2, 5), st.data())
def test_an_exhausted_source_stops_the_mixture_or_fails_or_leaves_its_share(weights, data):
    """Sources with "stop" or "fail" never end in `whole`. `lacking` lists the rows of `whole` that are beyond their limits."""
    count = len(weights)
    limits = [data.draw(st.one_of(st.none(), st.integers(1, 20))) for _ in weights]
    modes = [data.draw(st.sampled_from(["stop", "renormalize", "fail"])) for _ in weights]
    changes = [(0, shares(*weights)), (data.draw(st.integers(1, 40)), shares(*range(1, count + 1)))]
    soft_limits = [limit if mode == "renormalize" else None for limit, mode in zip(limits, modes, strict=True)]
    whole = Proportions(changes, soft_limits, modes)
    rows = np.arange(300 if whole.length is None else min(300, whole.length))
    sources, before = whole.choose(rows)
    is_hard = [limit is not None and mode != "renormalize" for limit, mode in zip(limits, modes, strict=True)]
    lacking = [row for row in rows.tolist() if is_hard[sources[row]] and before[row] >= limits[sources[row]]]
    mixed = Proportions(changes, limits, modes)
    if not lacking:
        assert mixed.length == whole.length or mixed.length is None or mixed.length >= 300
        return
    end, exhausted = lacking[0], int(sources[lacking[0]])
    assert (mixed.length, mixed.failure) == ((end, None) if modes[exhausted] == "stop" else (None, (end, exhausted)))
    assert mixed.choose(rows[:end])[0].tolist() == sources[:end].tolist()
    assert mixed.counts(end) == mixed.counts(end + 9) == np.bincount(sources[:end], minlength=count).tolist()
    assert mixed.find(exhausted, np.array([limits[exhausted]])).tolist() == [-1]


def test_weights_are_exact_numbers_from_0_on_and_at_least_one_is_above_0():
    assert shares(0.1, 0.7, 0.2) == shares("1/10", 7 / 10, "0.2") == shares(1, 7, 2)
    for weight in (-1, "a", None, True, float("nan"), float("inf"), "1/0"):
        with pytest.raises(SamplerError, match="weight of 'b'"):
            as_shares([("a", 1), ("b", weight)])
    with pytest.raises(SamplerError, match="expected one above 0"):
        shares(0, 0.0)
    with pytest.raises(SamplerError, match=r"source 'a': SourceOrder\(.*expected \(weight, SourceOrder"):
        Mixture({"a": SourceOrder(10, 1)})
    with pytest.raises(GrainSftError, match=r"source 'a' is 10 \(int\); expected a SourceOrder or Mixture"):
        Mixture({"a": (1, 10)})
    with pytest.raises(GrainSftError, match=r"sources is \[.*expected pairs \(weight, SourceOrder"):
        Mixture([(1, SourceOrder(10, 1))])
