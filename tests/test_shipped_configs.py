"""Every config under configs/ makes a pipeline."""

from pathlib import Path

import numpy as np
import pytest

import grain_sft
from grain_sft import Host

CONFIGS = sorted((Path(__file__).parents[1] / "configs").iterdir())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_delivers_batches(config, tmp_path):
    rows, length = 600, 8192
    np.arange(rows * length, dtype=np.uint32).tofile(tmp_path / "tokens.npy")
    (tmp_path / "mix.txt").write_text("label,{TOKENIZER}.npy\n")
    corpus = {"path": str(tmp_path / "mix.txt"), "path_remap": {"{TOKENIZER}": "tokens"}}
    pipeline = grain_sft.load({"inherits": str(config), "corpus": corpus}, host=Host(1, 2))
    batch = next(pipeline.iter())
    assert batch["inputs"].shape == (pipeline.sampler.global_batch_size // 2, length)
    np.testing.assert_array_equal(batch["inputs"][:, 0] // length, pipeline.sampler.rows(0))
