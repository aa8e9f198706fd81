"""Each packing algorithm makes the rows of a naive implementation, or rows with the properties that it states.

Algorithm `multipack` makes the batches of OpenChat's own sampler (tests/golden/make/make_multipack_golden.py).
"""

import hashlib
import importlib
import itertools
from collections.abc import Sequence
from unittest import mock

import numpy as np
import pytest
from batches import assert_same, examples, golden_values
from hypothesis import example, given, settings
from hypothesis import strategies as st
from packed_corpora import MULTIPACK_CASES, multipack_lengths, rows_digest

from grain_sft.layout.packing import ALGORITHMS, PackedRows, PackingOptions
from grain_sft.layout.packing.multipack import multipack
from grain_sft.layout.packing.shuffled_best_fit import shuffled_best_fit

CAPACITY = 24
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120)
SEGMENTS = st.one_of(st.none(), st.integers(1, 6))
BEST_FIT = importlib.import_module("grain_sft.layout.packing.best_fit_decreasing")
MANY = (10**9, 0)  # values of `_MANY`: best fit places documents row by row, or many at once


def pack(name: str, lengths: list[int], capacity: int = CAPACITY, **options) -> PackedRows:
    return ALGORITHMS[name](np.array(lengths, np.int64), PackingOptions(capacity, **options))


def documents_of(rows: PackedRows) -> list[list[int]]:
    return [each.tolist() for each in np.split(rows.document, rows.ends)[:-1]]


def plain_fit(lengths: list[int], most: int | None, *, best: bool, spaces: Sequence[int] = ()) -> list[list[int]]:
    """Return the rows of a naive first fit or best fit, the longest document first. Rows with `spaces` exist from the start.

    Best fit takes the row with the least sufficient space; among equal spaces, the row that has had its space for longest.
    """
    rows: list[list[int]] = [[] for _ in spaces]
    space, since = list(spaces), [-1] * len(spaces)
    for time, document in enumerate(sorted(range(len(lengths)), key=lambda each: -lengths[each])):
        length = lengths[document]
        fitting = [row for row in range(len(rows)) if space[row] >= length and (most is None or len(rows[row]) < most)]
        if not fitting:
            fitting = [len(rows)]
            rows.append([])
            space.append(CAPACITY)
            since.append(0)
        row = min(fitting, key=lambda each: (space[each], since[each])) if best else fitting[0]
        rows[row].append(document)
        space[row] -= length
        since[row] = time
    return rows


@pytest.mark.parametrize("many", [None, *MANY])
@settings(max_examples=examples(150))
@given(lengths=LENGTHS, most=SEGMENTS)
@example(lengths=[1] * 100, most=None)
@example(lengths=[1] * 100, most=3)
@example(lengths=[CAPACITY] * 10, most=1)
@example(lengths=[*range(CAPACITY // 3, CAPACITY + 1)] * 88, most=4)  # more than 1,024 rows
@example(lengths=[5, 4, 4, 3, 2, 1], most=2)  # 19 tokens would fit in one row, but 6 documents are too many
def test_rows_of_first_fit_and_best_fit_are_those_of_the_naive_fit(many, lengths, most):
    """Without `many`, the algorithm is first fit. Otherwise it is best fit, with this value of `_MANY`."""
    name = "first_fit_decreasing" if many is None else "best_fit_decreasing"
    with mock.patch.object(BEST_FIT, "_MANY", many):
        found = documents_of(pack(name, lengths, max_segments=most))
    assert found == plain_fit(lengths, most, best=many is not None)


@pytest.mark.parametrize("many", MANY)
@settings(max_examples=examples(60))
@given(lengths=LENGTHS, spaces=st.lists(st.integers(0, CAPACITY), max_size=20))
def test_best_fit_also_fills_rows_that_are_already_open(many, lengths, spaces):
    expected = plain_fit(lengths, None, best=True, spaces=spaces)
    with mock.patch.object(BEST_FIT, "_MANY", many):
        bins = BEST_FIT.assign(np.sort(lengths)[::-1], CAPACITY, spaces=np.array(spaces, np.int64))
    order = sorted(range(len(lengths)), key=lambda each: -lengths[each])
    assert [[order[at] for at in np.flatnonzero(bins == row)] for row in range(len(expected))] == expected


@settings(max_examples=examples(150))
@given(lengths=LENGTHS)
@example(lengths=[CAPACITY] * 5)
@example(lengths=[1])
def test_balanced_rows_hold_each_document_once_and_are_few(lengths):
    """There are no more rows than best fit makes, or the padding is at most 0.5 %."""
    found = documents_of(pack("balanced", lengths))
    assert sorted(each for row in found for each in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[each] for each in row) <= CAPACITY for row in found)
    assert len(found) <= max(len(pack("best_fit_decreasing", lengths).ends), sum(lengths) / CAPACITY / 0.995)


@pytest.mark.parametrize(("median", "capacity", "light"), [(180, 4096, 0.95), (5400, 32_768, 0.7)])
def test_balanced_rows_cost_about_the_same_except_for_long_documents(median, capacity, light):
    """A row costs the sum of its squared lengths.

    Few rows cost much less than the median. None costs much more than the median or than its longest document alone.
    """
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1, 20_000).astype(np.int64).clip(1, capacity)
    lightest = {}
    for name in ("best_fit_decreasing", "balanced"):
        rows = pack(name, lengths, capacity)
        begins = rows.ends - np.diff(rows.ends, prepend=0)
        costs, longest = np.add.reduceat(rows.length**2, begins), np.maximum.reduceat(rows.length, begins) ** 2
        lightest[name] = np.quantile(costs, 0.01) / np.median(costs)
    assert lightest["balanced"] > light and lightest["best_fit_decreasing"] < 0.12
    assert (costs / np.maximum(longest, np.median(costs))).max() < 1.35
    assert 1 - lengths.sum() / (len(rows.ends) * capacity) < 0.005


@settings(max_examples=examples(100))
@given(lengths=st.lists(st.integers(1, 3 * CAPACITY), min_size=1, max_size=60))
def test_concat_then_split_cuts_the_stream_where_a_row_is_full(lengths):
    rows = pack("concat_then_split", lengths)
    stream = [(document, offset) for document, length in enumerate(lengths) for offset in range(length)]
    found, first = [], 0
    for end in rows.ends.tolist():
        pieces = zip(*(column[first:end].tolist() for column in rows[:3]), strict=True)
        found.append([(document, offset + at) for document, offset, length in pieces for at in range(length)])
        assert len({document for document, _ in found[-1]}) == end - first
        first = end
    assert found == [stream[at : at + CAPACITY] for at in range(0, len(stream), CAPACITY)]


@settings(max_examples=examples(100))
@given(lengths=LENGTHS, most=SEGMENTS, seed=st.integers(0, 2**63), epoch=st.integers(0, 5), chunk=st.integers(1, 50))
def test_shuffled_best_fit_is_the_naive_best_fit_of_chunks_of_a_shuffled_order(lengths, most, seed, epoch, chunk):
    options = PackingOptions(CAPACITY, max_segments=most, seed=seed, epoch=epoch)
    rows = shuffled_best_fit(np.array(lengths, np.int64), options, chunk)
    np.testing.assert_array_equal(rows.length, np.array(lengths)[rows.document])
    assert_same(shuffled_best_fit(np.array(lengths, np.int64), options, chunk)._asdict(), rows._asdict())
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths)).tolist()
    size, found = min(chunk, -(-len(order) // max(2, sum(lengths) // (32 * CAPACITY)))), documents_of(rows)
    for part in (order[first : first + size] for first in range(0, len(order), size)):
        expected = [[part[at] for at in row] for row in plain_fit([lengths[each] for each in part], most, best=True)]
        assert sorted(found[: len(expected)]) == sorted(expected)
        del found[: len(expected)]
    assert not found


@pytest.mark.parametrize(("median", "capacity"), [(18, 400), (5400, 32_768)])  # many documents of each length, and few
@pytest.mark.parametrize("count", [300, 3000, 20_000])
def test_few_rows_of_several_documents_occur_in_two_epochs(count, median, capacity):
    """Best fit of all documents in one chunk would repeat most rows, because it depends only on lengths."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1, count).astype(np.int64).clip(1, capacity)
    epochs = []
    for epoch in range(3):
        rows = ALGORITHMS["shuffled_best_fit"](lengths, PackingOptions(capacity, seed=1, epoch=epoch))
        epochs.append({frozenset(row) for row in documents_of(rows) if len(row) > 1})
        assert 1 - lengths.sum() / (len(rows.ends) * capacity) < {300: 0.1, 3000: 0.025, 20_000: 0.01}[count]
    for first, second in itertools.combinations(epochs, 2):
        assert len(first & second) <= (0.2 if count == 300 else 0.04) * len(second)


GOLDEN = golden_values("multipack_batches.json")["cases"]


@pytest.mark.parametrize("case", MULTIPACK_CASES, ids=lambda case: case.name)
def test_batches_are_openchats(case):
    """Rows are compared by the lengths of their documents. If no lengths are equal, the documents of rows are compared too."""
    lengths, golden = multipack_lengths(case), GOLDEN[case.name]
    digest = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]
    assert digest == golden["corpus"], "numpy draws other lengths than it did"
    assert len(golden["epochs"]) == case.epochs
    assert ("documents" in golden["epochs"][0]) == (len(set(lengths.tolist())) == len(lengths) > 3)
    for epoch, expected in enumerate(golden["epochs"]):
        packed = multipack(lengths, PackingOptions(case.capacity, seed=case.seed, epoch=epoch, batch_rows=case.ranks))
        rows = [each.tolist() for each in np.split(packed.document, packed.ends)[:-1]]
        assert len(rows) == expected["batches"] * case.ranks
        batches = [rows[first : first + case.ranks] for first in range(0, len(rows), case.ranks)]
        sizes = [[sorted(lengths[row].tolist()) for row in batch] for batch in batches]
        shown = batches if "documents" in expected else sizes
        assert (shown[0][:2] if batches else []) == expected["first"]
        assert rows_digest(sizes) == expected["lengths"]
        assert "documents" not in expected or rows_digest(batches) == expected["documents"]
