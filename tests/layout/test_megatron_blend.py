"""`blend` chooses the data set of each sample, as megatron-core's compiled loop does sample by sample."""

import hashlib

import numpy as np
import pytest
from batches import golden_values
from megatron_corpora import BLEND_SIZE, BLENDS

from grain_sft.layout.megatron import blending
from grain_sft.layout.megatron.blending import BLOCK, blend, normalized

GOLDEN = golden_values("megatron_samples.json")["blends"]


@pytest.mark.parametrize("steps", [blending.STEPS, 0])
@pytest.mark.parametrize("name", BLENDS)
def test_blends_are_those_of_the_compiled_loop(name, steps, monkeypatch):
    """`blend` guesses the counts before each block, and corrects them in STEPS steps. With 0 steps, more blocks run again."""
    monkeypatch.setattr(blending, "STEPS", steps)
    found = blend(normalized(BLENDS[name]), BLEND_SIZE)
    indices = found.numbers_of(np.arange(BLEND_SIZE))
    assert hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in indices)).hexdigest()[:16] == GOLDEN[name]
    assert found.counts.tolist() == np.bincount(indices[0], minlength=len(BLENDS[name])).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(3, 40))])
def test_a_blend_equals_a_loop_over_all_samples(seed):
    """The weights are random, small integers or powers of 2. The last two kinds give ties."""
    random = np.random.default_rng(seed)
    datasets, size = int(random.choice([1, 2, 5, 20, 90])), int(random.integers(2_000, 9_000))
    uniform = random.random(datasets) ** 6 + 1e-6  # without 1e-6, a weight may be almost 0
    kinds = uniform, random.integers(1, 9, datasets), 2.0 ** -random.integers(0, 9, datasets)
    weights = normalized(kinds[seed % len(kinds)])
    taken, expected = np.zeros(datasets), []
    for sample in range(size):
        # The next sample is from the data set that is furthest behind its share of the samples so far.
        expected.append(int(np.argmax(weights * max(sample, 1) - taken)))
        taken[expected[-1]] += 1
    for count in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, size):
        found = blend(weights, count)
        assert found.chosen.tolist() == expected[:count]
        rows = np.array([count - 1, 0, count // 2])
        numbers = [expected[:row].count(expected[row]) for row in rows]
        assert [each.tolist() for each in found.numbers_of(rows)] == [[expected[row] for row in rows], numbers]
    assert found.counts.tolist() == taken.tolist()
