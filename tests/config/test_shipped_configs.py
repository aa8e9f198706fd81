"""Every config under configs/ states the run that it is named after. The batches of each are in test_batch_digests.py."""

from pathlib import Path

import pytest

from grain_sft.config import read_config
from grain_sft.config.parts import rows_of_batch, sizes_of

CONFIGS = Path(__file__).parents[2] / "configs"
OLMO = {"order": "olmo", "seed": 34521, "epochs": 2}
EPISODES = {"order": "episode", "seed": 1337}
CASES = {  # rows of a batch, tokens of a row, options of the sampler
    "eval_8192.yaml": (64, 8192, {"order": "sequential", "epochs": 1}),
    "pretrain_8192.yaml": (512, 8192, {"order": "shuffle", "seed": 34521}),
    "pretrain_8192_olmo_order.yaml": (512, 8192, {"order": "olmo", "seed": 34521}),
    "sft_packed_32768.yaml": (32, 32768, OLMO),
    "olmo3_7b_think_sft.yaml": (32, 32768, OLMO),
    "olmo3_32b_think_sft.yaml": (128, 32768, OLMO),
    "episodes.yaml": (8, 513, EPISODES),
    "episodes_gpt_config.json": (8, 513, EPISODES),
    "primer.yaml": (32, 1024, {"order": "shuffle", "seed": 42}),
    "primer_packed.yaml": (32, 1024, {"seed": 42}),
    "openchat.yaml": (8, 81_920, {"order": "openchat", "seed": 0, "epochs": 5}),
    "primer_mixture.yaml": (32, 1024, {"seed": 42}),
    "sft_with_pretraining.yaml": (32, 8192, {"seed": 34521}),
}


def test_every_config_is_a_case_and_names_its_schema():
    assert CASES.keys() == {path.name for path in CONFIGS.iterdir()}
    for path in CONFIGS.glob("*.yaml"):
        assert path.read_text().startswith("# yaml-language-server: $schema="), path


@pytest.mark.parametrize("name", CASES)
def test_a_config_has_the_rows_and_the_sampler_of_its_run(name):
    layout, sampler = (read_config(CONFIGS / name)[1][section] for section in ("layout", "sampler"))
    rows, length, options = CASES[name]
    assert (rows_of_batch(sampler, length), layout["sequence_length"]) == (rows, length)
    assert options.items() <= sampler.items()
    if name == "sft_with_pretraining.yaml":
        assert sizes_of(sampler["schedule"], length) == [(2000, 64)]
