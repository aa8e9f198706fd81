"""A run that learns nothing says so, with the reason, and one that learns says nothing."""

import contextlib
import json
import re

import numpy as np
import pytest
from absl import logging
from sft_files import EOS, write_olmo

import grain_sft
from grain_sft import Host
from grain_sft.cli.main import main
from grain_sft.pipeline import NUM_CHECKED, takes_loss
from grain_sft.verify import verify

COUNT, LENGTH = 200, 64


def document(length, loss, token=None):
    tokens = np.arange(3, 3 + length, dtype=np.uint32) if token is None else np.full(length, token, np.uint32)
    tokens[-1] = EOS
    return tokens, np.asarray(loss, bool)


def sound():
    return [document(20, np.arange(20) >= 8) for _ in range(COUNT)], {}


def zeros():
    return [document(20, np.zeros(20)) for _ in range(COUNT)], {}


def repeated():
    options = {"transforms": [{"ngram_filter": {"max_count": 16}}, "shift_targets"]}
    return [document(20, np.arange(20) >= 8, token=9) for _ in range(COUNT)], options


def truncated():
    keep = {"layout": {"kind": "padded", "sequence_length": LENGTH, "keep": "first"}}
    return [document(90, np.arange(90) >= 70) for _ in range(COUNT)], keep


def too_short():
    return [document(1, [True]) for _ in range(COUNT)], {
        "layout": {"kind": "padded", "sequence_length": LENGTH, "min_tokens": 1}
    }


def first_token_only():
    return [document(20, np.arange(20) == 0) for _ in range(COUNT)], {}


TEACH_NOTHING = {
    zeros: "the loss mask is 0 for each token of these rows and of their documents",
    repeated: r"NgramFilter\(.*max_count=16.*\) took the loss off all \d+ rows",
    truncated: "longer than sequence_length=64, and only tokens that were cut off take loss",
    too_short: "The longest document here has 1 token:",
    first_token_only: "only the first token of a document takes loss",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAIN_SFT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: found.append(text % values))
    return found


def write_config(make, folder, **sections):
    docs, options = make()
    write_olmo(folder / "corpus", docs, part_tokens=10**9)
    config = {
        "corpus": {"path": str(folder / "corpus"), "dtype": "uint16", "eos_token_id": EOS},
        "layout": {"kind": "packed", "sequence_length": LENGTH},
        "sampler": {"seed": 0, "global_batch_size": 4},
        **options,
        **sections,
    }
    path = folder / "run.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("make", TEACH_NOTHING, ids=lambda make: make.__name__)
def test_verify_fails_and_says_why(make, tmp_path, capsys):
    path = write_config(make, tmp_path)
    (finding,) = [each for each in verify(path).findings if each.wrong]
    assert finding.check == "loss"
    assert re.search(TEACH_NOTHING[make], finding.message), finding.message
    assert finding.message.startswith("no target takes loss in the first 8 steps: ")
    assert main(["verify", str(path)]) == 1
    assert "not sound" in capsys.readouterr().out


@pytest.mark.parametrize("make", TEACH_NOTHING, ids=lambda make: make.__name__)
@pytest.mark.parametrize("threads", [0, 2])
def test_iterating_warns_once_and_says_why(make, threads, tmp_path, warnings):
    pipeline = grain_sft.load(write_config(make, tmp_path), host=Host(0, 1))
    for _ in range(2):
        batches = pipeline.iter(threads=threads)
        for _ in range(2 * NUM_CHECKED):
            next(batches)
        batches.close()
    (sentence,) = warnings
    assert sentence.startswith("No target takes loss in the first batches (steps 0, 1, 2, 3): ")
    assert re.search(TEACH_NOTHING[make], sentence), sentence


def test_global_batches_warn_too(tmp_path, warnings):
    jax = pytest.importorskip("jax")
    from grain_sft.integrations.jax_arrays import GlobalBatches

    pipeline = grain_sft.load(write_config(zeros, tmp_path), host=Host(0, 1))
    with contextlib.closing(GlobalBatches(pipeline, jax.sharding.SingleDeviceSharding(jax.devices()[0]))) as batches:
        for _ in range(NUM_CHECKED + 32):  # the batch whose check warns may be one that is made ahead
            next(batches)
    assert len(warnings) == 1 and re.search(TEACH_NOTHING[zeros], warnings[0])


def test_a_run_of_fewer_steps_warns_at_its_last(tmp_path, warnings):
    sampler = {"seed": 0, "global_batch_size": 25, "epochs": 1}
    pipeline = grain_sft.load(write_config(zeros, tmp_path, sampler=sampler), host=Host(0, 1))
    assert 1 < len(pipeline) < NUM_CHECKED
    list(pipeline.iter())
    (sentence,) = warnings
    assert "(steps 0, 1)" in sentence


@pytest.mark.parametrize("transforms", [["shift_targets"], ["ngram_filter", "shift_targets"]])
def test_a_sound_run_warns_of_nothing(transforms, tmp_path, warnings):
    path = write_config(sound, tmp_path, transforms=transforms)
    pipeline = grain_sft.load(path, host=Host(0, 1))
    iterator = pipeline.iter()
    next(iterator)
    assert pipeline.first_steps.left == 0  # one batch is checked, not each
    iterator.close()
    assert not warnings and verify(path).sound


def test_a_pipeline_without_transforms_says_once_which_keys_it_gives(tmp_path, warnings):
    pipeline = grain_sft.load(write_config(sound, tmp_path, transforms=[]), host=Host(0, 1))
    iterator = pipeline.iter()
    assert "inputs" not in next(iterator) and "inputs" not in next(iterator)
    iterator.close()
    (sentence,) = warnings
    assert "keys tokens, loss_mask, segment_ids, positions" in sentence and "[ShiftTargets()]" in sentence


def test_the_check_changes_no_batch(tmp_path, warnings):
    path = write_config(zeros, tmp_path)
    checked, plain = (grain_sft.load(path, host=Host(0, 1)) for _ in range(2))
    batches = checked.iter()
    for step in range(6):
        batch, expected = next(batches), plain[step]
        assert batch.keys() == expected.keys()
        for key, array in expected.items():
            np.testing.assert_array_equal(batch[key], array)
    batches.close()
    assert checked.data_key == plain.data_key and checked.receipt == plain.receipt


def test_weights_of_zero_teach_nothing_and_other_batches_are_not_judged():
    segments = np.ones((2, 4), np.int32)
    assert takes_loss({"targets_segmentation": segments}) is True
    assert takes_loss({"targets_segmentation": segments, "targets_weights": np.zeros((2, 4), np.float32)}) is False
    assert takes_loss({"loss_mask": segments == 1, "segment_ids": 0 * segments}) is False
    assert takes_loss({"prompt": segments}) is None and takes_loss(segments) is None
