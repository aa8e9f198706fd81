"""`ShiftTargets` makes the targets, `TrimToMultiple` cuts columns of padding, and `NgramFilter` rejects repetitive rows.

The filter rejects the rows that OLMo-core's filter rejects, also with padding, and changes nothing but their loss.
"""

import dataclasses
import hashlib
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
from batches import assert_same, examples, golden_values, pipeline_of
from filter_corpora import EOS, PACKED_FILES, PAD, SEQUENCE_LENGTH, write_files
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import GrainSftError, NgramFilter, NpyDataSource, ShiftTargets, open_corpus
from grain_sft.errors import TransformError
from grain_sft.layout import PackedLayout, PaddedLayout, WindowLayout
from grain_sft.storage import activity
from grain_sft.transforms import MaskEod, ResetAtEod, TrimToMultiple

KEYS = {f"{kind}{of}" for kind in ("inputs", "targets") for of in ("", "_position", "_segmentation")}


def packed_row():
    """Return a row of two documents, of 4 and 3 tokens, and one token of padding. The second token of each takes no loss."""
    return {
        "tokens": np.array([11, 12, 13, 14, 21, 22, 23, 0], np.uint16),
        "loss_mask": np.array([1, 0, 1, 1, 1, 0, 1, 0], np.bool_),
        "segment_ids": np.array([1, 1, 1, 1, 2, 2, 2, 0], np.int32),
        "positions": np.array([0, 1, 2, 3, 0, 1, 2, 0], np.int32),
        "loss_weights": np.array([1, 2, 3, 4, 5, 6, 7, 8], np.float32),
    }


def test_loss_is_taken_on_targets_of_the_same_segment_that_are_not_masked():
    batch = ShiftTargets().map(packed_row())
    assert set(batch) == KEYS | {"targets_weights"}
    assert batch["inputs"].tolist() == [11, 12, 13, 14, 21, 22, 23, 0]
    assert batch["targets"].tolist() == [12, 13, 14, 21, 22, 23, 0, 0]
    assert batch["inputs_segmentation"].tolist() == [1, 1, 1, 1, 2, 2, 2, 0]
    assert batch["targets_segmentation"].tolist() == [0, 1, 1, 0, 0, 2, 0, 0]
    assert batch["inputs_position"].tolist() == batch["targets_position"].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert batch["targets_weights"].tolist() == [0, 3, 4, 0, 0, 7, 0, 0]


def test_a_loss_mask_of_integers_is_read_as_booleans():
    row = packed_row()
    expected = ShiftTargets().map(row)["targets_segmentation"].tolist()
    assert ShiftTargets().map({**row, "loss_mask": row["loss_mask"] * 2})["targets_segmentation"].tolist() == expected


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32, np.uint64, np.int32])
def test_tokens_of_every_dtype_become_int32(dtype):
    row = {**packed_row(), "tokens": np.arange(8, dtype=dtype)}
    del row["loss_weights"]
    batch = ShiftTargets().map(row)
    assert set(batch) == KEYS
    assert {array.dtype for array in batch.values()} == {np.dtype(np.int32)}
    assert batch["targets"].tolist() == [1, 2, 3, 4, 5, 6, 7, 0]


@pytest.mark.parametrize(("dtype", "token"), [(np.uint32, 1 << 31), (np.uint32, 2**32 - 1), (np.uint64, 1 << 40)])
def test_the_error_of_a_token_that_int32_cannot_hold_names_its_place(dtype, token):
    row = {**packed_row(), "tokens": np.zeros((2, 8), dtype)}
    row["tokens"][1, 5] = token
    with pytest.raises(GrainSftError, match=r"\[1, 5\].*wrong dtype"):
        ShiftTargets().map(row)


LENGTH = 100


@pytest.fixture
def source(write_tokens):
    rng = np.random.default_rng(0)
    docs = [np.append(rng.integers(3, 99, size), 2) for size in rng.integers(1, 120, 60)]
    path = write_tokens("a.npy", np.concatenate(docs), "uint16")
    return NpyDataSource(PaddedLayout(open_corpus(path, dtype="uint16", eos_token_id=2), LENGTH))


@pytest.mark.parametrize("multiple", [1, 16, 64, 100, 128])
@pytest.mark.parametrize("after", [False, True])
def test_padding_is_cut_to_the_next_multiple_and_no_token_is_cut(source, multiple, after):
    trim = TrimToMultiple(multiple)
    order = [NgramFilter(), ShiftTargets(), trim] if after else [NgramFilter(), trim, ShiftTargets()]
    options = {"global_batch_size": 3, "order": "shuffle", "epochs": 1}
    whole = pipeline_of(source.layout, [NgramFilter(), ShiftTargets()], **options)
    trimmed = pipeline_of(source.layout, order, **options)
    shapes = set()
    for step in range(len(whole)):
        longest = int((whole[step]["inputs_segmentation"] != 0).sum(axis=1).max())
        kept = min(LENGTH, -(-longest // multiple) * multiple)
        expected = {key: array[:, :kept].copy() for key, array in whole[step].items()}
        if not after:
            expected["targets"][:, -1] = 0  # the next token was cut off before targets were made
        assert_same(trimmed[step], expected)
        assert not whole[step]["inputs_segmentation"][:, kept:].any()
        assert_same(trimmed.read(step, np.array([2, 0])), {key: array[[2, 0]] for key, array in trimmed[step].items()})
        shapes.add((3, kept))
    listed = trim.shapes(source.layout, 3)
    assert shapes <= set(listed) and listed == sorted(set(listed)) and listed[-1] == (3, LENGTH)
    assert len(listed) == -(-LENGTH // multiple)


def test_rows_and_batches_of_padding_are_trimmed_and_a_batch_with_a_full_row_is_returned_as_it_is(source):
    trim = TrimToMultiple(16)
    for row in range(5):
        assert_same(trim.map(source[row]), {key: array[0] for key, array in trim.map(source.read([row])).items()})
    numbers = np.arange(40)
    batch = trim.map(source.read(np.full(40, -1)) | {"row_number": numbers, "n": 3})
    assert batch["tokens"].shape == (40, 16) and batch["row_number"] is numbers
    batch = trim.map(source.read([-1, -1]))
    assert batch["tokens"].shape == (2, 16) and not batch["loss_mask"].any()
    lengths = (source.read(range(len(source)))["segment_ids"] != 0).sum(axis=1)
    element = source.read([int(lengths.argmax()), 0])
    assert trim.map(element) is element


def test_the_error_of_a_batch_without_segments_names_the_missing_key():
    with pytest.raises(TransformError, match="needs the key 'inputs_segmentation'"):
        TrimToMultiple().map({"tokens": np.zeros((2, 8), np.uint32)})


GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "olmo_filter.npz")
PADDING = golden_values("olmo_filter_padding.json")


def element(tokens):
    return {"tokens": tokens, "loss_mask": np.ones(tokens.shape, np.bool_), "other": tokens}


RUNS = {name.removeprefix("rows_"): () for name in GOLDEN.files if name.startswith("rows_")}
RUNS |= {
    "96_p5_c3": (5, 1, 3),
    "96_p7_c10": (7, 1, 10),
    "96_p13_min3_c5": (13, 3, 5),
    "96_p13_c2": (13, 1, 2),
    "96_p13_c1": (13, 1, 1),
}
"""Options of OLMo-core's filter in each golden case: none, or max_period, min_period and max_count."""


@pytest.mark.parametrize("name", RUNS)
def test_verdicts_on_batches_and_on_rows_are_those_of_olmo_core(name):
    rows, clean = GOLDEN[f"rows_{name.partition('_')[0]}"], GOLDEN[f"clean_{name}"]
    filter = NgramFilter(*RUNS[name])
    for dtype in (np.uint16, np.uint32, np.uint64, np.int32):
        np.testing.assert_array_equal(~filter.fails(rows.astype(dtype)), clean)
    for row, passes in zip(rows, clean, strict=True):
        assert (filter.map(element(row))["loss_mask"] == passes).all()


def test_a_read_that_filters_rows_records_the_filter_as_the_activity_of_its_thread(tmp_path):
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "a.npy")
    source, filter = NpyDataSource(WindowLayout(open_corpus(tmp_path / "a.npy", dtype="uint32"), 8)), NgramFilter()
    ShiftTargets().read(source, np.array([0, 1]), filters=[filter])
    assert activity.doing[get_ident()] == (activity.TRANSFORMING, filter)


def longest_repeat(row, period):
    """Return the largest number of equal n-grams of `period` tokens that follow each other directly."""
    run = best = 0
    for i in range(period, len(row)):
        run = run + 1 if row[i] == row[i - period] else 0
        best = max(best, run)
    return (best + period) // period


@settings(max_examples=examples(200))
@given(st.lists(st.integers(0, 2), min_size=1, max_size=120), *[st.integers(1, most) for most in (13, 13, 12)])
def test_a_row_fails_exactly_if_it_repeats_an_ngram_often_enough(row, one, other, count):
    low, high = sorted((one, other))
    expected = any(longest_repeat(row, p) >= max(count, 3) for p in range(low, min(high, len(row) // 3) + 1))
    assert bool(NgramFilter(high, low, count).fails(np.array(row, np.uint16))) == expected


def test_only_rows_that_fail_lose_their_loss_and_nothing_else_changes():
    tokens = np.arange(3 * 600, dtype=np.uint32).reshape(3, 600)
    before = element(tokens)
    before["loss_mask"][0, :10] = False
    assert NgramFilter().map(before) is before
    tokens[1, 100:200] = 7
    after = NgramFilter().map(before)
    assert after["loss_mask"].sum(axis=1).tolist() == [590, 0, 600]
    assert after["tokens"] is tokens and after["other"] is tokens
    assert before["loss_mask"].sum() == 1790
    assert NgramFilter().fails(tokens[:0]).shape == (0,) and not NgramFilter().fails(tokens[:, :0]).any()


WRONG_OPTIONS = [
    (NgramFilter, {"min_period": 0}),
    (NgramFilter, {"min_period": 5, "max_period": 4}),
    (NgramFilter, {"max_count": 0}),
    *((NgramFilter, {"count_padding": value}) for value in (1, None, "yes")),
    (TrimToMultiple, {"multiple": 0}),
    (MaskEod, {"as_target": "false", "eod_token_id": 2}),
    *((ResetAtEod, {name: "false", "eod_token_id": 2}) for name in ("attention", "positions")),
]


@pytest.mark.parametrize(("transform", "options"), WRONG_OPTIONS)
def test_wrong_options_are_named(transform, options):
    with pytest.raises(GrainSftError, match=f"{transform.__name__}.*{next(iter(options))}"):
        transform(**options)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    corpus = open_corpus(write_files(tmp_path_factory.mktemp("documents")), dtype="uint16", eos_token_id=EOS)
    corpus = dataclasses.replace(corpus, pad_token_id=PAD)
    some = dataclasses.replace(corpus, shards=corpus.shards[:PACKED_FILES])
    padded = PaddedLayout(corpus, SEQUENCE_LENGTH, keep="first", min_tokens=1)
    return {"padded": NpyDataSource(padded), "packed": NpyDataSource(PackedLayout(some, SEQUENCE_LENGTH))}


def passes(filter, source):
    """Return which rows keep loss. Check that rows read one by one have the same verdicts as rows of a batch."""
    single = [filter.map(source[row])["loss_mask"].any() for row in range(0, len(source), 7)]
    kept = filter.map(source.read(range(len(source))))["loss_mask"].any(axis=1)
    assert kept[::7].tolist() == single
    return kept


@pytest.mark.parametrize(("kind", "count_padding"), [("padded", False), ("packed", True)])
def test_verdicts_on_rows_with_padding_are_those_of_olmo_core(sources, kind, count_padding):
    golden, source = PADDING[kind], sources[kind]
    tokens = source.read(range(len(source)))["tokens"]
    assert hashlib.sha256(tokens.astype("<u2").tobytes()).hexdigest()[:16] == golden["tokens"]
    kept = passes(NgramFilter(count_padding=count_padding), source)
    np.testing.assert_array_equal(kept, np.array(list(golden["passes"])) == "1")


def test_padding_of_packed_rows_does_not_count_by_default(sources):
    source = sources["packed"]
    batch = source.read(range(len(source)))
    lengths = (batch["segment_ids"] != 0).sum(axis=1)
    alone = [NgramFilter().fails(row[:length]) for row, length in zip(batch["tokens"], lengths, strict=True)]
    kept = passes(NgramFilter(), source)
    np.testing.assert_array_equal(kept, ~np.array(alone))
    assert (kept & ~passes(NgramFilter(count_padding=True), source)).sum() > 50


@pytest.mark.parametrize("place", ["left", "middle", "right"])
def test_padding_anywhere_in_a_row_does_not_count_as_a_repetition(place):
    tokens, segments = np.arange(1, 601, dtype=np.uint32), np.ones(600, np.int32)
    at = {"left": 0, "middle": 200, "right": 560}[place]
    tokens[at : at + 40], segments[at : at + 40] = 0, 0
    assert not NgramFilter().fails(tokens, segments) and NgramFilter(count_padding=True).fails(tokens, segments)
    tokens[300:332] = 9  # repeats of the row's own tokens still fail it
    assert NgramFilter().fails(tokens, segments)
