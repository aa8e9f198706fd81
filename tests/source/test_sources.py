"""NpyDataSource returns the arrays of one row or of many rows, opens few files, and is small when pickled."""

import gc
import pickle
import weakref

import numpy as np
import pytest
from batches import assert_same, open_files

import grain_sft
from grain_sft.layout import FILL_ROW, FillKey

LENGTH = 16


def make(write_tokens, counts, dtype="uint32", name="data"):
    """Return a corpus of files of `counts` random tokens, and its rows of tokens."""
    random = np.random.default_rng(len(counts))
    highest = min(np.iinfo(dtype).max, 1 << 40)
    arrays = [random.integers(0, highest, count, dtype, endpoint=True) for count in counts]
    listed = [write_tokens(f"{name}/{n}.npy", array, dtype) for n, array in enumerate(arrays)]
    rows = [array[: len(array) // LENGTH * LENGTH].reshape(-1, LENGTH) for array in arrays]
    return grain_sft.open_corpus(listed, dtype=dtype), np.concatenate(rows)


def source_of(corpus, **options):
    return grain_sft.NpyDataSource(grain_sft.WindowLayout(corpus, LENGTH), **options)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "uint64"])
def test_a_row_read_alone_equals_the_row_read_in_a_batch(write_tokens, dtype):
    corpus, rows = make(write_tokens, [100, 5, 64, 0, 77], dtype)
    source = source_of(corpus)
    assert len(source) == len(rows)
    ones, positions = np.ones(LENGTH, np.int32), np.arange(LENGTH, dtype=np.int32)
    for number, row in enumerate(rows):
        element = source[number]
        assert_same(element, {key: array[0] for key, array in source.read([number]).items()})
        expected = {"tokens": row, "loss_mask": ones != 0, "segment_ids": ones, "positions": positions}
        assert_same(element, expected)
        assert list(element) == list(expected)


def test_the_memory_of_batches_is_freed_with_the_source_without_a_garbage_collection(write_tokens):
    source = source_of(make(write_tokens, [100])[0])
    source.read_rows([0, 1])
    kept = [weakref.ref(each.memory) for buffers in source._arrays._buffers.values() for each in buffers]
    gc.disable()
    try:
        del source
        assert kept and not any(each() is not None for each in kept)
    finally:
        gc.enable()


def test_rows_come_in_the_requested_order_and_a_row_requested_twice_comes_twice(write_tokens):
    corpus, rows = make(write_tokens, [100, 64, 77])
    source = source_of(corpus)
    integers = [np.array([7, 0], kind) for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64)]
    for wanted in ([3, 0, 3, 3, 12, 1], range(len(rows)), range(len(rows) - 1, -1, -1), (5,), *integers):
        batch = source.read(wanted)
        assert all(array.shape == (len(wanted), LENGTH) for array in batch.values())
        np.testing.assert_array_equal(batch["tokens"], rows[list(wanted)])
        np.testing.assert_array_equal(source[wanted[0]]["tokens"], rows[wanted[0]])
    for nothing in ([], np.zeros(0, np.int64), range(0)):
        assert_same(source.read(nothing), {key: array[:0] for key, array in source.read([0]).items()})


def test_a_row_is_a_copy_that_may_be_written_to_and_arrays_that_batches_share_are_read_only(write_tokens, tmp_path):
    corpus, rows = make(write_tokens, [100, 64])
    source = source_of(corpus)
    before = [path.read_bytes() for path in sorted((tmp_path / "data").iterdir())]
    element, batch, expected = source[2], source.read([2, 3]), source[2]
    for array in (*element.values(), batch["tokens"]):
        array[:] = 0
    assert_same(source[2], expected)
    again = source.read([2, 3])
    np.testing.assert_array_equal(again["tokens"], rows[[2, 3]])
    for key in ("loss_mask", "segment_ids", "positions"):
        assert not np.shares_memory(batch[key], again[key]) or not again[key].flags.writeable
    assert before == [path.read_bytes() for path in sorted((tmp_path / "data").iterdir())]


@pytest.mark.parametrize("wanted", [[FILL_ROW], [0, FILL_ROW, 3], [FILL_ROW] * 4, [2, 1, FILL_ROW, FILL_ROW]])
def test_a_fill_row_is_padding_and_takes_no_loss(write_tokens, wanted):
    source = source_of(make(write_tokens, [100, 64])[0])
    expected = {key: array.copy() for key, array in source.read([max(row, 0) for row in wanted]).items()}
    for array in expected.values():
        array[np.array(wanted) == FILL_ROW] = 0
    assert_same(source.read(wanted), expected)
    np.testing.assert_array_equal(source.read([0, 1])["loss_mask"], np.ones((2, LENGTH), bool))
    assert not any(array.any() for array in source[FillKey(FILL_ROW)].values())  # a sampler's key of a fill row
    with pytest.raises(IndexError, match="Don't count from the end"):
        source[-1]


@pytest.mark.parametrize("wrong", [-2, -100, 10, 11, 1 << 40, 1 << 63, -(1 << 63) - 1, (1 << 64) - 1, 1 << 80])
def test_a_row_that_does_not_exist_is_an_index_error(write_tokens, wrong):
    source = source_of(make(write_tokens, [100, 64])[0])
    assert len(source) == 10
    for read in (lambda: source[wrong], lambda: source.read([0, wrong, 3]), lambda: source.read([FILL_ROW, wrong])):
        with pytest.raises(grain_sft.errors.RowIndexError, match=rf"row {wrong} of .*: expected 0 to 9\."):
            read()


def test_an_index_that_is_not_an_integer_is_an_error(write_tokens):
    source = source_of(make(write_tokens, [100])[0])
    for wrong in (1.5, "0", [0.5], np.arange(2)):
        for read in (source.__getitem__, source.layout.spans):
            with pytest.raises(grain_sft.errors.RowIndexError, match=r"rows? .* of WindowLayout.*: expected "):
                read(wrong)


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_files_are_opened_when_they_are_read_and_at_most_max_open_files_stay_open(write_tokens, tmp_path, limit):
    corpus, rows = make(write_tokens, [64] * 20)
    source = source_of(corpus, max_open_files=limit)
    assert not open_files(tmp_path)
    order = np.random.default_rng(0).permutation(len(rows))
    for count, number in enumerate(order.tolist(), 1):
        np.testing.assert_array_equal(source[number]["tokens"], rows[number])
        assert 1 <= len(open_files(tmp_path)) <= min(limit, count)
    np.testing.assert_array_equal(source.read(order)["tokens"], rows[order])
    assert len(open_files(tmp_path)) <= limit
    del source
    assert not open_files(tmp_path)


def test_a_pickle_holds_no_file_and_is_as_small_after_use_as_before(write_tokens, tmp_path):
    corpus, rows = make(write_tokens, [1000] * 4)
    source = source_of(corpus, max_open_files=2)
    before = pickle.dumps(source)
    source.read(range(len(rows)))
    after = pickle.dumps(source)
    assert abs(len(after) - len(before)) < 200 and len(after) < 4000
    del source
    again = pickle.loads(after)
    assert not open_files(tmp_path)
    np.testing.assert_array_equal(again.read(range(len(rows)))["tokens"], rows)
    assert len(open_files(tmp_path)) == 2  # max_open_files is pickled too
    assert repr(again) == repr(source_of(corpus)) and len(again) == len(rows)


def test_equal_sources_have_the_same_repr_wherever_their_files_are(write_tokens):
    one, other = make(write_tokens, [100, 64])[0], make(write_tokens, [100, 64], name="elsewhere")[0]
    assert repr(source_of(one)) == repr(source_of(one)) == repr(source_of(other, max_open_files=3))
    assert one.fingerprint in repr(source_of(one)) and str(LENGTH) in repr(source_of(one))
    assert repr(source_of(one)) != repr(source_of(make(write_tokens, [64, 100])[0]))
    assert repr(source_of(one)) != repr(grain_sft.NpyDataSource(grain_sft.WindowLayout(one, LENGTH + 1)))
