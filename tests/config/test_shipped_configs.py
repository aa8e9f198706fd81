"""Every config under configs/ gives, on two hosts, the batches of the run that it is named after."""

from pathlib import Path

import numpy as np
import pytest
from episode_corpora import write_dataset
from sft_files import write_olmo, write_openchat, write_primer

import grain_sft
from grain_sft import Host

CONFIGS = Path(__file__).parents[2] / "configs"
OLMO = {"order": "olmo", "seed": 34521, "epochs": 2}
EPISODES = {"order": "episode", "seed": 1337}
CASES = {  # corpus, shape of a host's batches, options of the sampler
    "eval_8192.yaml": ("mix", (32, 8192), {"order": "sequential", "epochs": 1}),
    "pretrain_8192.yaml": ("mix", (256, 8192), {"order": "shuffle", "seed": 34521}),
    "pretrain_8192_olmo_order.yaml": ("mix", (256, 8192), {"order": "olmo", "seed": 34521}),
    "sft_packed_32768.yaml": ("chats", (16, 32768), OLMO),
    "olmo3_7b_think_sft.yaml": ("chats", (16, 32768), OLMO),
    "olmo3_32b_think_sft.yaml": ("chats", (64, 32768), OLMO),
    "episodes.yaml": ("episodes", (4, 512), EPISODES),
    "episodes_gpt_config.json": ("episodes", (4, 512), EPISODES),
    "primer.yaml": ("primer", (16, 1024), {"order": "shuffle", "seed": 42}),
    "primer_packed.yaml": ("primer", (16, 1024), {"seed": 42}),
    "openchat.yaml": ("openchat", (4, 81_920), {"seed": 0}),
    "primer_mixture.yaml": ("three primers", (16, 1024), {}),
    "sft_with_pretraining.yaml": ("chats and mix", (16, 8192), {}),
}
SHARES = {"primer": 0.10, "oasst1": 0.70, "dolly15k": 0.20}


def chats(*sizes, end=2):
    """Return conversations of some sizes, without loss on the first seven tokens."""
    made = [(np.full(size, 9, np.uint32), np.arange(size) >= 7) for size in sizes]
    for tokens, _ in made:
        tokens[-1] = end
    return made


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """`load(name, hosts=2)`: the pipeline of a config, over a small corpus, on the last host."""
    folder = tmp_path_factory.mktemp("shipped")
    np.arange(600 * 8192, dtype=np.uint32).tofile(folder / "tokens.npy")
    (folder / "mix.txt").write_text("label,{TOKENIZER}.npy\n")
    sizes = np.random.default_rng(0).integers(8000, 40000, 60).tolist() + [32768] * 98
    long = write_olmo(folder / "chats", chats(*sizes, end=100257), dtype="uint32", part_tokens=10**9)
    openchat = write_openchat(folder / "openchat", chats(*[15_000, 30_000, 9_000] * 16))
    names = {name: write_primer(folder / name, chats(*[40 + at] * 9)) for at, name in enumerate(SHARES)}
    mix = {"path": str(folder / "mix.txt"), "path_remap": {"{TOKENIZER}": "tokens"}}
    corpora = {
        "mix": mix,
        "chats": {"path": str(long)},
        "episodes": {"path": str(write_dataset(folder / "episodes", weighted=True))},
        "primer": {"path": str(write_primer(folder / "examples", chats(*[500, 1024, 700] * 30)))},
        "openchat": {"path": str(openchat)},
        "three primers": {"mixture": {name: {"path": str(path)} for name, path in names.items()}},
        "chats and mix": {"mixture": {"chat": {"path": str(long)}, "web": mix}},
    }

    def load(name, hosts=2):
        corpus = corpora[CASES[name][0]]
        stated = {"dataset_dir": corpus["path"]} if name.endswith(".json") else {"corpus": corpus}
        return grain_sft.load({"inherits": str(CONFIGS / name), **stated}, host=Host(hosts - 1, hosts))

    return load


def test_all_configs_are_tried_here():
    assert CASES.keys() == {path.name for path in CONFIGS.iterdir()}


@pytest.mark.parametrize("name", CASES)
def test_batches_have_the_shape_and_the_sampler_the_options_of_the_run(load, name):
    pipeline, (_, shape, options) = load(name), CASES[name]
    assert next(pipeline.iter())["inputs"].shape == shape
    assert {option: getattr(pipeline.sampler, option) for option in options} == options


def test_pretraining_reads_whole_windows_and_filters_them(load):
    pipeline = load("pretrain_8192_olmo_order.yaml")
    np.testing.assert_array_equal(pipeline[0]["inputs"][:, 0] // 8192, pipeline.sampler.rows(0))
    assert repr(pipeline.transforms[0]).startswith("NgramFilter(max_period=13, min_period=1, max_count=32,")


@pytest.mark.parametrize(("name", "padding"), [("sft_packed_32768.yaml", 100257), ("olmo3_7b_think_sft.yaml", 100277)])
def test_chats_are_packed_padded_and_masked(load, name, padding):
    batch = load(name)[0]
    segments, trained = batch["inputs_segmentation"], batch["targets_segmentation"] != 0
    assert segments.max() > 1 and (segments == 0).any() and (batch["inputs"][segments == 0] == padding).all()
    assert trained.any() and (batch["targets_position"][trained] >= 6).all()  # the first 7 tokens take no loss


def test_a_trainers_config_of_episodes_is_our_own(load):
    assert load("episodes.yaml").data_key == load("episodes_gpt_config.json").data_key


def test_examples_of_the_primer_are_padded_or_packed(load):
    assert [len(load(name).source) for name in ("primer.yaml", "primer_packed.yaml")] == [90, 75]


def test_openchat_packs_five_epochs_of_weighted_rows(load):
    pipeline = load("openchat.yaml")
    assert pipeline.source.layout.packing.algorithm == "multipack"
    assert len(pipeline) == 5  # 864,000 tokens: one batch of 8 x 81,920 in each epoch
    batch = pipeline[4]
    assert batch["targets_weights"].dtype == np.float32
    assert (batch["inputs"][batch["inputs_segmentation"] == 0] == 0).all()


def test_chats_with_pretraining_have_larger_batches_from_step_2000_on(load):
    assert load("sft_with_pretraining.yaml").sampler.batch_sizes.schedule == ((2000, 64),)
