"""The launcher's command line and the checks of MaxText's config, without MaxText."""

import importlib.util
import json
import types

import numpy as np
import pytest
from batches import sections
from sft_files import documents, write_episodes

from grain_sft import GrainSftError, Host, load
from grain_sft.integrations import maxtext
from grain_sft.integrations.maxtext import Options, main, split
from grain_sft.integrations.maxtext.checks import KEYS, check_batches, check_trainer, check_weights, prepare


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    for name in ("CONFIG", "EVAL_CONFIG", "ALLOW_OTHER_DATA", "IGNORE_WEIGHTS"):
        monkeypatch.delenv(f"GRAIN_SFT_{name}", raising=False)


@pytest.fixture
def config(tmp_path):
    np.arange(64, dtype=np.uint32).tofile(tmp_path / "a.npy")
    windows = {"corpus": {"dtype": "uint32"}, "layout": "windows", "order": "shuffle"}
    (tmp_path / "config.json").write_text(json.dumps(sections(tmp_path / "a.npy", 8, **windows)))
    return tmp_path / "config.json"


def changed(config, **sampler):
    """The sections of a config with other options of the sampler."""
    stated = json.loads(config.read_text())
    return stated | {"sampler": stated["sampler"] | sampler}


def test_our_keys_are_taken_out_of_maxtexts(monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_EVAL_CONFIG", "eval.json")
    monkeypatch.setenv("GRAIN_SFT_CONFIG", "lower.json")
    theirs, options = split(["base.yml", "steps=3", "grain_sft_config=a=b.json", "grain_sft_ignore_weights=True"])
    assert theirs == ["base.yml", "steps=3", "dataset_type=olmo_grain"]
    assert options == Options(config="a=b.json", eval_config="eval.json", ignore_weights=True)
    assert split(["base.yml", "dataset_type=olmo_grain"])[0] == ["base.yml", "dataset_type=olmo_grain"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "grain_sft_config is not given"),
        (["grain_sft_confg=a.json"], "unknown key 'grain_sft_confg'. The nearest known: 'grain_sft_config'."),
        (["grain_sft_allow_other_data=yes"], "expected true or false"),
        (["grain_sft_config=nowhere.json"], "nowhere.json: no such file"),
        (["grain_sft_config={config}", "grain_sft_eval_config=nowhere.json"], "nowhere.json: no such file"),
        (["grain_sft_config={config}", "dataset_type=synthetic"], "dataset_type=synthetic: the data are grain_sft's"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(config, capsys, words, message):
    assert main(["base.yml", *(word.format(config=config) for word in words)]) == 1
    error = capsys.readouterr().err
    assert message in error and error.startswith("grain_sft.integrations.maxtext: ") and error.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("maxtext") is not None, reason="maxtext is installed")
def test_without_maxtext_the_extra_is_named(config, capsys):
    assert main(["base.yml", f"grain_sft_config={config}"]) == 1
    assert "docs/maxtext.md" in capsys.readouterr().err


def test_an_evaluation_reads_every_row_once_and_fills_the_last_batch_unless_its_config_says_otherwise(config):
    pipeline = maxtext.load_evaluation(str(config))
    assert (pipeline.sampler.epochs, pipeline.sampler.last_batch, len(pipeline)) == (1, "fill", 2)
    config.write_text(json.dumps(changed(config, epochs=3, last_batch="drop")))
    pipeline = maxtext.load_evaluation(str(config))
    assert (pipeline.sampler.epochs, pipeline.sampler.last_batch, len(pipeline)) == (3, "drop", 6)


def test_weights_are_refused_unless_they_are_to_be_ignored(tmp_path):
    write_episodes(tmp_path, documents(weights=True))
    stated = sections(tmp_path, 32, corpus={"format": "episodes", "eos_token_id": 2}, layout="padded")
    weighted = load(stated, host=Host(0, 1))
    with pytest.raises(GrainSftError, match=r"sft: the corpus has weights .* grain_sft_ignore_weights=true"):
        check_weights(weighted, "sft", ignore=False)
    check_weights(weighted, "sft", ignore=True)
    kept = prepare(1000, "sft", lambda step: np.arange(4))(0, weighted[0])
    assert tuple(kept) == KEYS
    stated["corpus"]["use_loss_mask"] = False
    check_weights(load(stated, host=Host(0, 1)), "sft", ignore=False)


def test_a_token_beyond_the_vocabulary_is_named_with_its_place(config):
    pipeline = load(str(config), host=Host(0, 1))
    rows = np.array([1, 3])
    check = prepare(64, "here", lambda step: rows)
    batch = pipeline.read(0, rows)
    assert check(0, batch)["inputs"] is batch["inputs"]
    largest = int(batch["inputs"].max())
    (row, column) = np.argwhere(batch["inputs"] == largest)[0]
    place = f"here: step 0, row {rows[row]} of the global batch, position {column}"
    message = rf"{place}: token {largest}, .* is {largest}\."
    with pytest.raises(GrainSftError, match=message):
        prepare(largest, "here", lambda step: rows)(0, batch)


def maxtext_config(**changed):
    """What the checks read of MaxText's config, for the pipeline of `config`."""
    shapes = {"global_batch_size_to_train_on": 4, "max_target_length": 8, "vocab_size": 64, "packing": True, "steps": 2}
    options = {"dataset_type": "olmo_grain", "enable_rampup_batch_size": False, "expansion_factor_real_data": -1.0}
    return types.SimpleNamespace(**shapes | options | changed)


@pytest.mark.parametrize(
    ("key", "value", "advice"),
    [
        ("dataset_type", "synthetic", "Remove the key"),
        ("enable_rampup_batch_size", True, "Set it to false"),
        ("reuse_example_batch", 1, "Set it to 0"),
        ("training_objective", "block_diffusion", "Choose another"),
        ("expansion_factor_real_data", 0.5, "Set it to -1"),
    ],
)
def test_options_under_which_a_step_is_not_a_batch_are_refused(key, value, advice):
    check_trainer(maxtext_config())
    with pytest.raises(GrainSftError, match=rf"MaxText's {key} is {value!r}: .* {advice}\."):
        check_trainer(maxtext_config(**{key: value}))


def test_data_that_end_before_the_last_step_are_refused(config):
    finite = load(changed(config, epochs=1), host=Host(0, 1))
    assert len(finite) == 2
    check_batches(maxtext_config(), finite, "here", training=True)
    with pytest.raises(GrainSftError, match=r"here: the data end after 2 steps, .* steps is 3, .* Set steps=2"):
        check_batches(maxtext_config(steps=3), finite, "here", training=True)
