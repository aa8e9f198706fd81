"""A run warns once, with the reason, if no target takes loss in its first batches. Other runs do not warn."""

import contextlib
import re

import jax
import numpy as np
import pytest
from absl import logging
from batches import load, sections, take, write_config
from sft_files import EOS, write_olmo, write_pairs

from grain_sft.integrations.jax_arrays import GlobalBatches
from grain_sft.pipeline import NUM_CHECKED, takes_loss
from grain_sft.verify import verify

COUNT, LENGTH = 200, 64
PADDED = {"kind": "padded", "sequence_length": LENGTH}
FILTER = {"transforms": [{"ngram_filter": {"max_count": 16}}, "shift_targets"]}
CASES = {  # loss of each document, changes of the config, and the reason
    "zeros": (np.zeros(20), {}, "the loss mask is 0 for each token of these rows and of their documents"),
    "repeated": (np.arange(20) >= 8, FILTER, r"NgramFilter\(.*max_count=16.*\) took the loss off all \d+ rows"),
    "truncated": (
        np.arange(90) >= 70,
        {"layout": {**PADDED, "keep": "first"}},
        "longer than a row of 64 tokens, and only tokens that are not in these rows take loss",
    ),
    "too short": (np.ones(1), {"layout": {**PADDED, "min_tokens": 1}}, "The longest document here has 1 token:"),
    "first token only": (np.arange(20) == 0, {}, "only the first token of a document takes loss"),
}
SOUND_LOSS = np.arange(20) >= 8


@pytest.fixture
def warnings(monkeypatch):
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *values: found.append(text % values))
    return found


def config_of(folder, case, **changes):
    """Write a config of equal documents to `folder`, and return its path. Cases that are not in `CASES` are sound."""
    loss, options, _ = CASES.get(case, (SOUND_LOSS, {}, ""))
    tokens = np.full(len(loss), 9) if case == "repeated" else np.arange(3, 3 + len(loss))
    tokens[-1] = EOS
    write_olmo(folder / "corpus", [(tokens.astype(np.uint32), loss.astype(bool))] * COUNT, part_tokens=10**9)
    config = sections(folder / "corpus", LENGTH, corpus={"dtype": "uint16", "eos_token_id": EOS})
    return write_config(folder / "run.json", config | options | changes)


@pytest.mark.parametrize("case", CASES)
def test_verify_fails_and_an_iterator_warns_once_with_the_reason(case, tmp_path, warnings, run_command):
    path, reason = config_of(tmp_path, case), CASES[case][2]
    (finding,) = [each for each in verify(path).findings if each.wrong]
    assert finding.check == "loss"
    assert re.match(f"no target takes loss in the first 8 steps: .*{reason}", finding.message), finding.message
    assert "not sound" in run_command("verify", path, status=1).out
    for threads in (0, 2):
        pipeline = load(path)
        for _ in range(2):
            take(pipeline, 0, 2 * NUM_CHECKED, threads=threads)
        sentence = warnings.pop()
        assert not warnings
        expected = rf"No target takes loss in the first batches \(steps 0, 1, 2, 3\): .*{reason}"
        assert re.match(expected, sentence), sentence


@pytest.mark.parametrize("length", [16, 44])
def test_pairs_whose_responses_are_cut_to_the_same_tokens_are_reported(length, tmp_path, warnings):
    """15 of 20 pairs have responses that differ only in their last token, and 7 of them no prompt. 5 pairs have no response."""
    same = list(range(3, 23))
    pairs = [[[7] * (number % 2 == 0), [*same, 30 + number], [*same, 60]] for number in range(15)] + [[[7], [], []]] * 5
    write_pairs(tmp_path / "pairs", pairs)
    path = write_config(tmp_path / "run.json", sections(tmp_path / "pairs", length, layout="pairs", order="sequential"))
    found = verify(path)
    cut = length == 16
    (note,) = [each for each in found.findings if "of 20 pairs" in each.message]
    assert note.message.startswith(f"{20 if cut else 5} of 20 pairs have equal responses")
    assert note.place == f"row {0 if cut else 15}" and found.figures["equal_responses"] == (20 if cut else 5)
    assert {each.check for each in found.findings if each.wrong} - {"boundaries"} == ({"loss"} if cut else set())
    take(load(path), 0, NUM_CHECKED)
    expected = r"No target takes loss .* all \d+ rows that were checked: the chosen response of each pair is equal"
    assert [bool(re.match(expected, each)) for each in warnings] == [True] * cut


def test_global_batches_warn_too(tmp_path, warnings):
    pipeline = load(config_of(tmp_path, "zeros"))
    with contextlib.closing(GlobalBatches(pipeline, jax.sharding.SingleDeviceSharding(jax.devices()[0]))) as batches:
        for _ in range(NUM_CHECKED + 32):  # a thread that makes a later batch may give the warning
            next(batches)
    (sentence,) = warnings
    assert CASES["zeros"][2] in sentence


def test_a_step_that_is_read_again_counts_once(tmp_path, warnings):
    pipeline = load(config_of(tmp_path, "zeros"))
    for _ in range(NUM_CHECKED):
        take(pipeline, 0, 1, threads=0)
    assert not warnings and pipeline.first_steps.left == NUM_CHECKED - 1


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_run_of_fewer_steps_than_are_checked_warns_at_its_last_batch(tmp_path, warnings, order):
    """Threads may make the two batches in any order."""
    pipeline = load(config_of(tmp_path, "zeros", sampler={"seed": 0, "global_batch_size": 25, "epochs": 1}))
    assert len(pipeline) == 2 < NUM_CHECKED
    for step in order:
        assert not warnings
        pipeline.first_steps.check(pipeline, step, pipeline[step])
    (sentence,) = warnings
    assert "(steps 0, 1)" in sentence


@pytest.mark.parametrize("transforms", [["shift_targets"], ["ngram_filter", "shift_targets"]])
def test_a_sound_run_warns_of_nothing(transforms, tmp_path, warnings):
    path = config_of(tmp_path, "sound", transforms=transforms)
    pipeline = load(path)
    take(pipeline, 0, 1)
    assert pipeline.first_steps.left == 0  # a batch with loss ends the check
    assert not warnings and verify(path).sound


def test_a_pipeline_without_transforms_warns_once_with_the_keys_of_its_batches(tmp_path, warnings):
    pipeline = load(config_of(tmp_path, "sound", transforms=[]))
    assert not any("inputs" in batch for batch in take(pipeline, 0, 2))
    (sentence,) = warnings
    assert "keys tokens, loss_mask, segment_ids, positions" in sentence and "[ShiftTargets()]" in sentence


def test_takes_loss_is_false_for_weights_of_zero_and_none_for_batches_with_other_keys():
    segments = np.ones((2, 4), np.int32)
    assert takes_loss({"targets_segmentation": segments}) is True
    assert takes_loss({"targets_segmentation": segments, "targets_weights": np.zeros((2, 4), np.float32)}) is False
    assert takes_loss({"loss_mask": segments == 1, "segment_ids": 0 * segments}) is False
    assert takes_loss({"chosen_ids": segments, "rejected_ids": segments}) is False
    assert takes_loss({"chosen_ids": segments, "rejected_ids": 2 * segments}) is True
    assert takes_loss({"prompt": segments}) is None and takes_loss(segments) is None
