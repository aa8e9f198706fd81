"""Order "shuffle" equals Grain's `index_shuffle` but never repeats a row. Order "grain" equals Grain's `MapDataset.shuffle`."""

import grain
import numpy as np
import pytest
from grain.experimental import index_shuffle
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_sft
from grain_sft.sampling.orders.index_shuffle import permuted

BROKEN = [(1 << bits) + 1 for bits in range(16, 50, 2)]  # numbers of rows for which Grain repeats a row
ROWS = st.integers(1 << 16, 1 << 50).filter(lambda rows: rows not in BROKEN)


@settings(max_examples=60, deadline=None)
@given(ROWS, st.integers(0, (1 << 32) - 1), st.integers(0))
def test_many_indices_are_permuted_as_grain_permutes_each(rows, key, seed):
    indices = np.append(np.random.default_rng(seed).integers(0, rows, 600), [0, rows - 1])
    expected = [index_shuffle(index, rows - 1, key, 8) for index in indices.tolist()]
    np.testing.assert_array_equal(permuted(indices, rows, key, 8), expected)
    np.testing.assert_array_equal(permuted(indices[-20:], rows, key, 8), expected[-20:])


@pytest.mark.parametrize("rows", [1 << 16, (1 << 16) + 1, (1 << 16) + 2, (1 << 17) + 1, 99_999])
def test_each_row_is_read_once_an_epoch(rows):
    (stream,) = grain_sft.IndexSampler(rows, global_batch_size=1, seed=5).streams
    found = stream.rows_at(3, np.arange(rows))
    np.testing.assert_array_equal(np.sort(found), np.arange(rows))
    for index in (0, 1, rows // 2, rows - 2, rows - 1):
        assert stream.rows_at(3, np.array([index])) == found[index]


def test_grain_repeats_a_row_of_65537():
    assert index_shuffle(65536, 65536, 9, 8) == index_shuffle(0, 65536, 9, 8)  # if this fails, remove our correction


@pytest.mark.parametrize("rows", [1, 3, 700, 16_384, 16_385, 70_001])
def test_order_grain_is_the_order_of_grains_shuffle(rows):
    seed, epochs = 2**32 - 2, 4
    dataset = grain.MapDataset.range(rows).shuffle(seed).repeat(epochs)
    (stream,) = grain_sft.IndexSampler(rows, global_batch_size=1, seed=seed, order="grain").streams
    for epoch in range(epochs):
        indices = np.unique(np.linspace(0, rows - 1, 550).astype(np.int64))
        expected = [dataset[epoch * rows + index] for index in indices.tolist()]
        np.testing.assert_array_equal(stream.rows_at(epoch, indices), expected)
        np.testing.assert_array_equal(stream.rows_at(epoch, indices[-3:]), expected[-3:])


@pytest.mark.parametrize(("rows", "seed", "message"), [(65_537, 0, "has one row twice"), (9, 2**32, "seeds below")])
def test_order_grain_refuses_what_grain_cannot_do(rows, seed, message):
    with pytest.raises(grain_sft.GrainSftError, match=message):
        grain_sft.IndexSampler(rows, global_batch_size=1, seed=seed, order="grain")
