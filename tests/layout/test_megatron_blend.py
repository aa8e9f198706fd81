"""The blend of Megatron-core's compiled loop, by chains that run at once."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from megatron_corpora import BLEND_SIZE, BLENDS

from grain_sft.layout import megatron_blend
from grain_sft.layout.megatron_blend import BLOCK, blend, normalized

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "megatron_samples.json").read_text())["blends"]


@pytest.mark.parametrize("steps", [megatron_blend.STEPS, 0])
@pytest.mark.parametrize("name", BLENDS)
def test_blends_are_those_of_the_compiled_loop(name, steps, monkeypatch):
    """Whether guesses are corrected by some steps before they are used, or by running again."""
    monkeypatch.setattr(megatron_blend, "STEPS", steps)
    found = blend(normalized(BLENDS[name]), BLEND_SIZE)
    indices = found.numbers_of(np.arange(BLEND_SIZE))
    assert hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in indices)).hexdigest()[:16] == GOLDEN[name]
    assert found.counts.tolist() == np.bincount(indices[0], minlength=len(BLENDS[name])).tolist()


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1])
def test_a_blend_begins_as_a_longer_one(size):
    weights = normalized(BLENDS["uneven"])
    found, longer = blend(weights, size), blend(weights, 3 * BLOCK)
    np.testing.assert_array_equal(found.chosen, longer.chosen[:size])
    rows = np.array([size - 1, 0, size // 2])
    np.testing.assert_array_equal(found.numbers_of(rows), longer.numbers_of(rows))
