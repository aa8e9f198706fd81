"""`PackedLayout` packs documents into rows, and counts the documents and tokens that its rows leave out.

The cost of a row in attention is the sum of the squares of its segment lengths.
"""

import collections
import pickle
import tempfile
from pathlib import Path

import numpy as np
import pytest
from batches import assert_same, examples
from document_corpora import EOS, Made, make, row_of_spans
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_sft import NpyDataSource, PackedLayout, PaddedLayout, WindowLayout, open_corpus
from grain_sft.errors import LayoutError
from grain_sft.layout import LAYOUTS, MixtureLayout, plan_files
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.report import attention_spread
from grain_sft.source import MixtureSource

BY_EPOCH = [name for name in ALGORITHMS if ALGORITHMS[name].packs_per_epoch]
KINDS = ("plain", "parts", "episodes")


def assert_rows(made: Made, layout: PackedLayout) -> None:
    """Check the properties that the rows of every packing of a corpus have."""
    source, length = NpyDataSource(layout), layout.sequence_length
    rows = source.read(range(len(layout)))
    begins: set[tuple[int, int]] = set()  # document and offset of each piece
    sizes = collections.Counter[int]()  # number of tokens in the pieces of each document
    segments, with_multiples_of_3 = 0, []
    for row in range(len(layout)):
        pieces, expected = row_of_spans(made, layout, row)
        assert_same(source[row], expected)
        assert_same({key: array[row] for key, array in rows.items()}, expected)
        segments += len(pieces)
        if any(document % 3 == 0 for document, _, _ in pieces):
            with_multiples_of_3.append(row)
        for document, offset, size in pieces:
            whole = len(made.tokens[document])
            if size < whole and layout.packing.algorithm != "concat_then_split":
                assert offset % length == 0 and size == min(length, whole - offset)
                assert offset == 0 or layout.packing.long_documents == "fragment"
            assert (document, offset) not in begins or layout.epochs > 1
            begins.add((document, offset))
            sizes[document] += size
    assert layout.rows_of_documents(np.arange(0, layout.num_documents, 3)).tolist() == with_multiples_of_3
    assert_counts(made, layout, segments, sizes)


def assert_counts(made, layout, segments, sizes):
    statistics, whole, used = layout.statistics, [len(each) for each in made.tokens], sum(sizes.values())
    expected = {"rows": len(layout), "documents": len(whole) * layout.epochs, "tokens": used, "segments": segments}
    expected["padding"] = len(layout) * layout.sequence_length - used
    if layout.epochs == 1:
        dropped = [size for number, size in enumerate(whole) if number not in sizes]
        lost = [whole[number] - size for number, size in sizes.items()]
        expected |= {"dropped_documents": len(dropped), "dropped_tokens": sum(dropped)}
        expected |= {"cut_documents": np.count_nonzero(lost), "cut_tokens": sum(lost)}
    assert {name: statistics[name] for name in expected} == expected
    assert statistics["dropped_tokens"] + statistics["cut_tokens"] + used == sum(whole) * layout.epochs


@settings(max_examples=examples(80))
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.one_of(st.integers(1, 12), st.integers(1, 60)), min_size=1, max_size=50),
    part=st.integers(1, 50),
    outside=st.sampled_from([0, 0, 3]),
    length=st.integers(1, 40),
    algorithm=st.sampled_from(list(ALGORITHMS)),
    long=st.sampled_from(["truncate", "fragment"]),
    group=st.integers(1, 4),
    most=st.one_of(st.none(), st.integers(1, 4)),
    ties=st.sampled_from(["stable", "numpy"]),
    batch_rows=st.integers(1, 3),
)
def test_every_document_has_a_segment_of_its_own_or_is_counted_as_left_out(
    kind, lengths, part, outside, length, algorithm, long, group, most, ties, batch_rows
):
    with tempfile.TemporaryDirectory() as temp:
        made = make(kind, Path(temp) / "corpus", lengths, part=part, outside=outside)
        options = {"algorithm": algorithm, "long_documents": long, "source_group_size": group, "ties": ties}
        if ALGORITHMS[algorithm].bounds_segments:
            options["max_segments"] = most
        try:
            layout = PackedLayout(made.corpus, length, batch_rows=batch_rows, cache_dir=temp, **options)
        except LayoutError as error:
            assert "don't fill one batch" in str(error) and algorithm == "multipack"
            return
        assert_rows(made, layout)
        statistics = layout.statistics
        if algorithm != "multipack":
            assert statistics["dropped_documents"] == 0
        if algorithm == "concat_then_split" or (long == "fragment" and algorithm != "multipack"):
            assert statistics["cut_documents"] == 0
        if options.get("max_segments"):
            assert statistics["max_segments"] <= most


def test_with_boundaries_eos_boundary_files_are_ignored_and_parts_cut_documents(tmp_path):
    """OLMo-core looks for EOS file by file: tokens after the last EOS of a file are in no document."""
    made = make("parts", tmp_path / "corpus", [10, 20, 6], part=16)
    layout = PackedLayout(made.corpus, 32, boundaries="eos", cache_dir=tmp_path)
    assert sorted(span.stop - span.start for row in range(len(layout)) for span in layout.spans(row)) == [4, 10, 14]
    assert layout.statistics["documents"] == 3
    assert layout.left_out()[-1] == ("in no document", None, 8)


@pytest.mark.parametrize("algorithm", BY_EPOCH)
def test_epochs_follow_each_other_and_each_is_packed_anew(tmp_path, algorithm):
    made = make("plain", tmp_path / "corpus", np.random.default_rng(0).integers(2, 40, 300).tolist())
    options = {"algorithm": algorithm, "seed": 5, "batch_rows": 2, "cache_dir": tmp_path / "cache"}
    three = PackedLayout(made.corpus, 64, epochs=3, **options)
    one = PackedLayout(made.corpus, 64, **options)
    assert_rows(made, three)

    def rows(layout):
        return [frozenset(layout.spans(row)) for row in range(len(layout))]

    every = rows(three)
    assert every[: len(one)] == rows(one)
    sizes = [len(plan.ends) for plan in three.plans]
    assert len(every) == sum(sizes)
    epochs = [set(every[sum(sizes[:epoch]) : sum(sizes[: epoch + 1])]) for epoch in range(3)]
    for number, epoch in enumerate(epochs):
        documents = [span.document for row in epoch for span in row]
        assert len(documents) == len(set(documents)) and (algorithm != "shuffled_best_fit" or len(documents) == 300)
        several = {row for row in epoch if len(row) > 1}
        assert all(len(several & other) < 0.1 * len(epoch) for other in epochs[:number])
    again = PackedLayout(made.corpus, 64, epochs=3, **{**options, "cache_dir": tmp_path / "other"})
    assert rows(again) == every and repr(again) == repr(three)
    assert {Path(plan["path"]).is_relative_to(tmp_path / "other") for plan in plan_files(again)} == {True}
    other = PackedLayout(made.corpus, 64, epochs=3, **{**options, "seed": 6})
    assert rows(other) != every and repr(other) != repr(three)
    shuffled, source = np.random.default_rng(1).permutation(len(three)), NpyDataSource(three)
    whole = source.read(range(len(three)))
    assert_same(source.read(shuffled), {key: array[shuffled] for key, array in whole.items()})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_pickle_is_small_and_opens_the_same_rows(tmp_path, algorithm):
    made = make("episodes", tmp_path / "corpus", list(range(2, 80)), outside=2)
    epochs = 2 if algorithm in BY_EPOCH else 1
    layout = PackedLayout(made.corpus, 64, algorithm=algorithm, epochs=epochs, cache_dir=tmp_path / "cache")
    source = NpyDataSource(layout)
    expected = source.read(range(len(source)))
    data = pickle.dumps(source)
    assert len(data) < 10_000
    for path in (tmp_path / "cache").rglob("*.arrays"):
        path.chmod(0o444)
    again = pickle.loads(data)
    assert repr(again) == repr(source)
    assert_same(again.read(range(len(again))), expected)


@pytest.mark.parametrize("kind", ["packed", "padded", "olmo_vsl", "megatron_gpt"])
def test_a_corpus_without_documents_is_an_error(tmp_path, kind):
    np.array([5, 6, 7], np.uint16).tofile(tmp_path / "a.npy")
    options = {"packed": {"cache_dir": tmp_path}, "olmo_vsl": {"min_sequence_length": 2}}.get(kind, {})
    with pytest.raises(LayoutError, match=r"no document of the corpus has a token\. Check its eos_"):
        LAYOUTS[kind](open_corpus(tmp_path / "a.npy", dtype="uint16", eos_token_id=EOS), 8, **options)
    assert not list(tmp_path.rglob("*.arrays")) and not list(tmp_path.rglob("*.tmp"))


def test_a_seed_that_the_algorithm_does_not_use_does_not_change_the_plan(tmp_path):
    """Best fit does not use the seed, so two seeds share one file in the cache."""
    made = make("plain", tmp_path / "corpus", [5, 6, 7])
    for seed in (0, 1):
        PackedLayout(made.corpus, 8, seed=seed, cache_dir=tmp_path)
    assert len(list(tmp_path.rglob("*.arrays"))) == 1


@settings(max_examples=examples(80))
@given(
    kind=st.sampled_from(KINDS),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    part=st.integers(1, 30),
    outside=st.sampled_from([0, 3]),
    length=st.integers(1, 30),
    keep=st.sampled_from(["last", "first"]),
    least=st.integers(1, 5),
)
def test_rows_are_the_documents_that_are_long_enough_in_order(kind, lengths, part, outside, length, keep, least):
    with tempfile.TemporaryDirectory() as temp:
        made = make(kind, Path(temp), lengths, part=part, outside=outside)
        kept = [number for number, size in enumerate(lengths) if size >= least]
        if not kept:
            with pytest.raises(LayoutError, match=f"no document of {len(lengths)} has {least} tokens or more"):
                PaddedLayout(made.corpus, length, keep=keep, min_tokens=least)
            return
        layout = PaddedLayout(made.corpus, length, keep=keep, min_tokens=least)
        assert (len(layout), layout.dropped) == (len(kept), len(lengths) - len(kept))
        assert layout.cut_tokens == sum(max(0, lengths[number] - length) for number in kept)
        assert layout.left_out()[0][1] == sum(lengths[number] > length for number in kept)
        rows = NpyDataSource(layout).read(range(len(layout)))
        for row, number in enumerate(kept):
            size = min(lengths[number], length)
            pieces, expected = row_of_spans(made, layout, row)
            assert pieces == [(number, lengths[number] - size if keep == "last" else 0, size)]
            assert_same({key: array[row] for key, array in rows.items()}, expected)
            assert_same(NpyDataSource(layout)[row], expected)


LENGTHS = np.random.default_rng(3).lognormal(2, 1, 90).astype(np.int64).clip(2, 70).tolist()


def test_costs_are_the_sums_of_squares_of_the_segments_that_are_read(tmp_path):
    corpus = make("parts", tmp_path / "parts", LENGTHS, part=130).corpus  # documents continue in the next shard
    per_epoch = {"algorithm": "shuffled_best_fit", "seed": 2, "epochs": 2}
    padded, packed = PaddedLayout(corpus, 32), PackedLayout(corpus, 32, source_group_size=9)
    mixture = MixtureLayout({"a": packed, "b": padded})
    for layout in (WindowLayout(corpus, 32), padded, packed, PackedLayout(corpus, 32, **per_epoch), mixture):
        sources = {part: NpyDataSource(of_part) for part, of_part in layout.parts.items()}
        source = MixtureSource(sources) if layout is mixture else NpyDataSource(layout)
        segments = (source[row]["segment_ids"] for row in range(len(layout)))
        costs = [int((np.bincount(each[each > 0]) ** 2).sum()) for each in segments]
        assert layout.row_costs().tolist() == costs, layout


def test_devices_share_a_step_unevenly_if_rows_are_random_and_almost_evenly_if_rows_cost_the_same():
    costs = np.random.default_rng(1).lognormal(8, 1, 6400).astype(np.int64)
    found = {each["rows_a_device"]: each for each in attention_spread(costs, costs // 2)}
    assert list(found) == [1, 2, 4] and {each["devices"] for each in found.values()} == {64}
    one = costs[: 64 * 90].reshape(90, 64)
    assert found[1]["shuffled"] == pytest.approx((one.max(axis=1) / one.mean(axis=1)).mean(), rel=0.1)
    assert found[1]["floor"] == pytest.approx(found[1]["shuffled"] / 2, rel=1e-3)
    for each in found.values():
        # balanced: rows of about the same cost. floor: what the longest document of a step makes unavoidable.
        assert 1 <= each["balanced"] < 1.1 < each["floor"] < each["shuffled"]
    alone = {"rows_a_device": 1, "devices": 1, "shuffled": 1.0, "floor": 1.0, "balanced": 1.0}
    assert attention_spread(costs[:1], costs[:1])[0] == alone
