"""Every config under configs/ makes a pipeline."""

from pathlib import Path

import numpy as np
import pytest
from sft_files import write_olmo

import grain_sft
from grain_sft import Host

CONFIGS = sorted((Path(__file__).parents[1] / "configs").iterdir())
PACKED = [path for path in CONFIGS if "packed" in path.name]


@pytest.mark.parametrize("config", [path for path in CONFIGS if path not in PACKED], ids=lambda path: path.name)
def test_a_shipped_config_delivers_batches(config, tmp_path):
    rows, length = 600, 8192
    np.arange(rows * length, dtype=np.uint32).tofile(tmp_path / "tokens.npy")
    (tmp_path / "mix.txt").write_text("label,{TOKENIZER}.npy\n")
    corpus = {"path": str(tmp_path / "mix.txt"), "path_remap": {"{TOKENIZER}": "tokens"}}
    pipeline = grain_sft.load({"inherits": str(config), "corpus": corpus}, host=Host(1, 2))
    batch = next(pipeline.iter())
    assert batch["inputs"].shape == (pipeline.sampler.global_batch_size // 2, length)
    np.testing.assert_array_equal(batch["inputs"][:, 0] // length, pipeline.sampler.rows(0))


@pytest.mark.parametrize("config", PACKED, ids=lambda path: path.name)
def test_a_shipped_config_of_packed_rows_delivers_batches(config, tmp_path):
    length, rng = 32768, np.random.default_rng(0)
    docs = [(np.full(size, 9, np.uint32), np.arange(size) >= 7) for size in rng.integers(8000, 40000, 150)]
    for tokens, _ in docs:
        tokens[-1] = 100257
    write_olmo(tmp_path / "sft", docs, dtype="uint32", part_tokens=10**9)
    pipeline = grain_sft.load({"inherits": str(config), "corpus": {"path": str(tmp_path / "sft")}}, host=Host(1, 2))
    batch = next(pipeline.iter())
    assert batch["inputs"].shape == (16, length) and pipeline.sampler.global_batch_size == 32
    assert pipeline.sampler.seed == 34521 and pipeline.sampler.epochs == 2
    assert batch["inputs_segmentation"].max() > 1
    trained = batch["targets_segmentation"] != 0
    assert (batch["targets_position"][trained] >= 6).all()  # the first 7 tokens of a document take no loss
