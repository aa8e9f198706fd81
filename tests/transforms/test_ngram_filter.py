"""`NgramFilter` rejects the rows that OLMo-core's filter rejects, also with padding, and changes nothing but their loss."""

import dataclasses
import hashlib
from pathlib import Path
from threading import get_ident

import numpy as np
import pytest
from batches import examples, golden_values
from filter_corpora import EOS, PACKED_FILES, PAD, SEQUENCE_LENGTH, write_files
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import GrainSftError, NgramFilter, NpyDataSource, ShiftTargets, open_corpus
from grain_sft.layout import PackedLayout, PaddedLayout, WindowLayout
from grain_sft.storage import activity
from grain_sft.transforms import MaskEod, ResetAtEod, TrimToMultiple

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


@settings(max_examples=examples(200), deadline=None)
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
