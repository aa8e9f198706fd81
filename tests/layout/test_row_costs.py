"""The cost of a row in attention is the sum of the squares of its segment lengths."""

import numpy as np
import pytest
from document_corpora import make

from grain_sft import NpyDataSource, PackedLayout, PaddedLayout, WindowLayout
from grain_sft.layout import MixtureLayout
from grain_sft.layout.report import attention_spread
from grain_sft.source import MixtureSource

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
