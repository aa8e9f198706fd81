"""A trainer's GPTConfig is a config. It gives the batches of the trainer's own loader, which reads rows of episodes."""

import numpy as np
import pytest
from batches import error_of, golden_values, load, write_config
from episode_corpora import CHANGES, GPT_CONFIG, LENGTHS, write_dataset

from grain_sft import Host
from grain_sft.config.gpt_config import GPT_CONFIG as KEYS
from grain_sft.options import REQUIRED

RUNS = golden_values("episode_batches.json")["runs"]
OTHERS = {
    **{"name": "Chat SFT", "vocab_size": 50304, "dropout": 0.1, "tie_weights": True, "save_dtype": None},
    **{"grad_accum_steps": 3, "eval_sets": {"layout": "data/other"}, "eval_seed": 1337, "dataset_mode": "sft_episode"},
}
"""Keys that only the trainer reads."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("episodes") / "data")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("hosts", [1, 2])
def test_batches_equal_those_of_the_trainers_loader(tmp_path, name, hosts):
    """x, y and mask are compared past the end of the first epoch. The mask is 0 or 1, or the weights of the targets."""
    keys = {**GPT_CONFIG, **CHANGES[name]}
    if keys["batch_size"] % hosts:
        hosts = 5  # the run "short rows" has batches of 5 rows
    folder = write_dataset(tmp_path / "data", weighted=name == "weights")
    path = write_config(tmp_path / "run.json", {**OTHERS, **keys, "dataset_dir": str(folder)})
    pipelines = [load(path, Host(index, hosts)) for index in range(hosts)]
    expected = RUNS[name]
    for step, (x, y) in enumerate(zip(expected["x"], expected["y"], strict=True)):
        parts = [pipeline[step] for pipeline in pipelines]
        batch = {key: np.stack([part[key] for part in parts], 1).reshape(len(x), -1) for key in parts[0]}
        for key, array in (("inputs", x), ("targets", y)):
            np.testing.assert_array_equal(batch[key], array)
            assert batch[key].dtype == np.int32
        assert all(part[key].flags.c_contiguous for part in parts for key in part)
        taken = batch["targets_segmentation"] != 0
        if "mask" not in expected:  # the loader gives no mask; in our batches, padding takes no loss
            np.testing.assert_array_equal(taken[:, :-1], batch["inputs_segmentation"][:, 1:] != 0)
        else:
            mask = batch["targets_weights"] if name == "weights" else taken.astype(np.float32)
            np.testing.assert_array_equal(mask, expected["mask"][step])
    assert sum(map(len, expected["x"])) > sum(length >= keys["episode_min_tokens"] for length in LENGTHS)


def test_without_a_mask_the_last_token_of_a_whole_row_takes_loss_too(data):
    """A whole row, one without padding, has the EOT as its last target. Other rows end with the padding token 777."""
    keys = {**GPT_CONFIG, "use_loss_mask": False, "block_size": 4, "pad_token_id": 777}
    pipeline = load({**keys, "dataset_dir": str(data)})
    for step in range(3):
        batch = pipeline[step]
        whole = batch["inputs_segmentation"].all(axis=1) & (batch["targets"][:, -1] != 777)
        assert whole.any() and (batch["targets_segmentation"][whole] == 1).all()


def test_a_config_that_inherits_a_trainers_config_may_change_its_dataset_dir_and_seed(data, tmp_path, monkeypatch):
    write_config(tmp_path / "configs" / "sft1" / "base.json", {**OTHERS, **GPT_CONFIG})
    mine = {"inherits": "configs/sft1/base.json", "epoch_seed": 7}
    write_config(tmp_path / "configs" / "sft1" / "mine.json", mine)
    monkeypatch.chdir(tmp_path)
    pipeline = load({"inherits": "configs/sft1/mine.json", "dataset_dir": str(data)})
    assert pipeline.data_key == load({**GPT_CONFIG, "epoch_seed": 7, "dataset_dir": str(data)}).data_key
    (tmp_path / "configs" / "sft1" / "data").symlink_to(data)
    in_same_folder = write_config(tmp_path / "configs" / "sft1" / "whole.json", {**mine, "dataset_dir": "data"})
    assert load(in_same_folder).data_key == pipeline.data_key


def test_the_sections_of_a_config_replace_the_trainers_keys(data):
    keys = {**GPT_CONFIG, "dataset_dir": str(data), "sampler": {"epochs": 2, "global_batch_size": 4}}
    pipeline = load({**keys, "corpus": {"eos_token_id": 2}})
    assert pipeline.sampler.epochs == 2 and pipeline.sampler.global_batch_size == 4
    assert pipeline.sampler.order == "episode" and len(pipeline) == 2 * len(pipeline.source) // 4
    del keys["dataset_dir"], keys["batch_size"]
    assert load({**keys, "corpus": {"path": str(data)}}).data_key == pipeline.data_key


def test_the_defaults_are_those_of_the_loader(data):
    smallest = load({"batch_size": 6, "block_size": 16, "dataset_dir": str(data)})
    defaults = {key: option.default for key, option in KEYS.items() if option.default is not REQUIRED}
    stated = {**defaults, "batch_size": 6, "block_size": 16, "dataset_dir": str(data)}
    assert smallest.data_key == load(stated).data_key
    assert set(stated) == set(KEYS)
    assert "seed=1337, order='episode'" in smallest.data_key and "last_batch='drop'" in smallest.data_key
    assert "min_tokens=2" in smallest.data_key and not smallest.source.layout.corpus.has_loss


def test_random_mode_draws_with_replacement_and_has_no_epochs(data):
    keys = {**GPT_CONFIG, "dataset_dir": str(data), "batch_sampling_mode": "random"}
    # the mode ignores epoch_shuffle and epoch_drop_last, but the order of `own` uses them
    pipeline = load({**keys, "epoch_shuffle": False, "epoch_drop_last": True})
    assert pipeline.sampler.order == "random" and pipeline.sampler.shuffle
    assert pipeline.data_key == load(keys).data_key
    rows = np.concatenate([pipeline.sampler.rows(step) for step in range(7)])
    assert len(set(rows.tolist())) < len(rows)
    own = load({**keys, "epoch_shuffle": False, "epoch_drop_last": False, "sampler": {"order": "shuffle"}}).sampler
    assert (own.shuffle, own.last_batch) == (False, "run_on")


MISTAKES = [
    ({"epoch_sed": 1}, "unknown key 'epoch_sed'. The nearest known: 'epoch_seed'."),
    ({"batch_sampling_mode": "epochs"}, "batch_sampling_mode is 'epochs'; expected one of epoch, random."),
    ({"block_size": 0}, "block_size is 0; expected an integer (1 or more)."),
    ({"epoch_seed": -1}, ": epoch_seed is -1; expected an integer (0 or more)."),
    ({"batch_size": 100, "epoch_drop_last": True}, "global_batch_size=100 is more than the"),
    ({"dataset_dir": "none"}, "none"),
    ({"dataset_dir": 5}, "dataset_dir is 5; expected text."),
    ({"sampler": {"sed": 5}}, "sampler: unknown key 'sed'. The nearest known: 'seed'."),
    ({"layout": {"kind": "padded"}}, "unknown key 'batch_size'"),  # with `layout.kind`, the config is not a GPTConfig
]


@pytest.mark.parametrize(("changes", "expected"), MISTAKES, ids=str)
def test_the_error_names_the_mistake(data, tmp_path, changes, expected):
    path = write_config(tmp_path / "a.json", {**GPT_CONFIG, "dataset_dir": str(data), **changes})
    message = error_of(path)
    assert message.startswith(f"{path}: ") and expected in message


def test_keys_for_which_the_loader_has_no_default_are_required(data, tmp_path):
    path, keys = tmp_path / "a.json", {**GPT_CONFIG, "dataset_dir": str(data)}
    for key in ("dataset_dir", "batch_size", "block_size"):
        message = error_of(write_config(path, {name: value for name, value in keys.items() if name != key}))
        assert message.startswith(f"{path}: a GPTConfig lacks the key {key!r}.")
        assert (key == "dataset_dir") == ('here it is a key: "dataset_dir": "data/chat_sft".' in message), key


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_mixture_replaces_the_dataset_dir(data, tmp_path, drop_last):
    base = write_config(tmp_path / "base.json", {**GPT_CONFIG, "epoch_drop_last": drop_last, "batch_size": 2})
    mixture = {name: {"path": str(data / "train"), "weight": 1} for name in ("a", "b")}
    pipeline = load({"inherits": str(base), "corpus": {"mixture": mixture}})
    assert [stream.name for stream in pipeline.sampler.streams] == ["a", "b"]


def test_a_dataset_that_does_not_state_its_eot_needs_a_pad_id(tmp_path):
    folder = write_dataset(tmp_path / "data")
    (folder / "dataset_metadata.json").unlink()
    keys = {**GPT_CONFIG, "dataset_dir": str(folder)}
    assert "corpus.pad_token_id is null" in error_of(keys)
    assert load({**keys, "pad_token_id": 5}).source.layout.corpus.pad_token_id == 5
