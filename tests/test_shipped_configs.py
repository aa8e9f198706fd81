"""Every config under configs/ makes a pipeline, and says what the run it is named after was given."""

from pathlib import Path

import numpy as np
import pytest
from episode_corpora import write_dataset
from sft_files import write_olmo, write_openchat, write_primer

import grain_sft
from grain_sft import Host

CONFIGS = Path(__file__).parents[1] / "configs"
WINDOWS = ["eval_8192.yaml", "pretrain_8192.yaml", "pretrain_8192_olmo_order.yaml"]
PACKED_32K = {"sft_packed_32768.yaml": 32, "olmo3_7b_think_sft.yaml": 32, "olmo3_32b_think_sft.yaml": 128}
EPISODES = ["episodes.yaml", "episodes_gpt_config.json"]
PRIMER = ["primer.yaml", "primer_packed.yaml"]
MIXTURES = ["primer_mixture.yaml", "sft_with_pretraining.yaml"]


def chats(*sizes, trained_from=7, end=100257):
    """Return conversations of some sizes, without loss on the first tokens."""
    made = [(np.full(size, 9, np.uint32), np.arange(size) >= trained_from) for size in sizes]
    for tokens, _ in made:
        tokens[-1] = end
    return made


def load(name, hosts=2, **sections):
    return grain_sft.load({"inherits": str(CONFIGS / name), **sections}, host=Host(hosts - 1, hosts))


def test_all_configs_are_tried_here():
    tried = {*WINDOWS, *PACKED_32K, *EPISODES, *PRIMER, *MIXTURES, "openchat.yaml"}
    assert tried == {path.name for path in CONFIGS.iterdir()}


def write_mix(folder, rows, file="tokens.npy", length=8192):
    np.arange(rows * length, dtype=np.uint32).tofile(folder / "tokens.npy")
    (folder / "mix.txt").write_text(f"label,{file}\n")
    return str(folder / "mix.txt")


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name, tmp_path):
    length, mix = 8192, write_mix(tmp_path, 600, "{TOKENIZER}.npy")
    pipeline = load(name, corpus={"path": mix, "path_remap": {"{TOKENIZER}": "tokens"}})
    batch = next(pipeline.iter())
    assert batch["inputs"].shape == (pipeline.sampler.global_batch_size // 2, length)
    np.testing.assert_array_equal(batch["inputs"][:, 0] // length, pipeline.sampler.rows(0))
    if name == "pretrain_8192_olmo_order.yaml":
        assert pipeline.sampler.order == "olmo" and pipeline.sampler.global_batch_size * length == 1 << 22
        assert repr(pipeline.transforms[0]).startswith("NgramFilter(max_period=13, min_period=1, max_count=32,")


@pytest.mark.parametrize("name", PACKED_32K)
def test_rows_of_32768_tokens(name, tmp_path):
    length, rows = 32768, PACKED_32K[name]
    sizes = np.random.default_rng(0).integers(8000, 40000, 60).tolist() + [length] * (rows - 30)
    write_olmo(tmp_path / "sft", chats(*sizes), dtype="uint32", part_tokens=10**9)
    pipeline = load(name, corpus={"path": str(tmp_path / "sft")})
    batch = next(pipeline.iter())
    assert batch["inputs"].shape == (rows // 2, length) and pipeline.sampler.global_batch_size == rows
    assert pipeline.sampler.seed == 34521 and pipeline.sampler.epochs == 2 and pipeline.sampler.order == "olmo"
    everything = pipeline.source.read(range(len(pipeline.source)))
    assert everything["segment_ids"].max() > 1
    trained = batch["targets_segmentation"] != 0
    assert trained.any() and (batch["targets_position"][trained] >= 6).all()  # the first 7 tokens take no loss
    padding = everything["tokens"][everything["segment_ids"] == 0]
    assert padding.size and (padding == (100257 if name.startswith("sft") else 100277)).all()


@pytest.mark.parametrize("name", EPISODES)
def test_episodes(name, tmp_path):
    folder = write_dataset(tmp_path / "data", weighted=True)
    place = {"dataset_dir": str(folder)} if name.endswith(".json") else {"corpus": {"path": str(folder)}}
    pipeline = load(name, **place)
    first, second = next(pipeline.iter()), next(pipeline.iter(start_step=9))
    assert first["inputs"].shape == second["inputs"].shape == (4, 512) and pipeline.sampler.streams[0].begin(9)[0] == 2
    assert pipeline.data_key == load(EPISODES[0], corpus={"path": str(folder)}).data_key


@pytest.mark.parametrize("name", PRIMER)
def test_primer(name, tmp_path):
    folder = write_primer(tmp_path / "primer", chats(*[500, 1024, 700] * 30, end=2))
    pipeline = load(name, corpus={"path": str(folder)})
    batch = next(pipeline.iter(start_step=5))
    assert batch["inputs"].shape == (16, 1024)
    assert len(pipeline.source) == {"primer.yaml": 90, "primer_packed.yaml": 75}[name]


def test_openchat(tmp_path):
    sizes = [15_000, 30_000, 9_000] * 16
    folder = write_openchat(tmp_path / "openchat", chats(*sizes, end=2))
    pipeline = load("openchat.yaml", corpus={"path": str(folder)})
    assert pipeline.source.layout.packing.algorithm == "multipack" and pipeline.sampler.global_batch_size == 8
    assert len(pipeline) == 5  # 864,000 tokens: one batch of 8 x 81,920 in each of 5 epochs
    batch = pipeline[4]
    assert batch["inputs"].shape == (4, 81_920) and batch["targets_weights"].dtype == np.float32
    assert (batch["inputs"][batch["inputs_segmentation"] == 0] == 0).all()


def test_the_primer_mixture(tmp_path):
    shares = {"primer": 0.10, "oasst1": 0.70, "dolly15k": 0.20}
    folders = [write_primer(tmp_path / name, chats(*[40 + at] * 9, end=2)) for at, name in enumerate(shares)]
    paths = {name: {"path": str(folder)} for name, folder in zip(shares, folders, strict=True)}
    pipeline = load("primer_mixture.yaml", corpus={"mixture": paths})
    assert pipeline[3]["inputs"].shape == (16, 1024)
    whole = load("primer_mixture.yaml", hosts=1, corpus={"mixture": paths})
    rows = np.concatenate([whole.sampler.rows(step) for step in range(100)])
    part = whole.source.layout.parts_of(rows)
    for number, share in enumerate(shares.values()):
        assert np.abs(np.cumsum(part == number) - share * np.arange(1, 3201)).max() < 1
    assert whole.source.layout.names == tuple(shares)


def test_sft_with_pretraining(tmp_path):
    write_olmo(tmp_path / "sft", chats(*[5000, 3000] * 1000), dtype="uint32", part_tokens=10**9)
    paths = {"chat": {"path": str(tmp_path / "sft")}, "web": {"path": write_mix(tmp_path, 40)}}
    pipeline = load("sft_with_pretraining.yaml", corpus={"mixture": paths})
    assert pipeline[0]["inputs"].shape == (16, 8192)
    chat = len(pipeline.source.layout.parts["chat"])
    assert chat == 1000 and 2000 / 0.9 / 32 - 2 < len(pipeline) <= 2000 / 0.9 / 32 + 1
    assert pipeline.sampler.batch_sizes.schedule == ((2000, 64),)
