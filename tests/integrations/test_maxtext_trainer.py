"""MaxText's pre-training has the same losses on windows and packed SFT rows, whether it is stopped and resumed or not.

The tests take minutes:
python -m pytest -n0 -m maxtext tests/integrations/test_maxtext_trainer.py
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import doc_pages as pages
import numpy as np
import pytest
from batches import load, put, sections, write_config
from maxtext_runs import LAUNCHER, LENGTH, MODEL, NEEDED, ROWS, base_config
from page_folders import Folders
from sft_files import documents, write_olmo
from trainer_runs import run as run_program

pytestmark = NEEDED


def launch(out, run, *more, fails=False, devices=1, **keys):
    """Run the launcher in a process of its own, and return its output."""
    metrics = out / f"{run}-{len(list(out.glob(f'{run}-*.jsonl')))}.jsonl"
    given = MODEL | {"eval_interval": 2, "run_name": run, "base_output_directory": out, "metrics_file": metrics} | keys
    arguments = [base_config("base.yml"), *(f"{key}={value}" for key, value in given.items()), *more]
    flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return run_program(LAUNCHER, arguments, fails=fails, cache=out.parent / "cache", environment=flags)


STEP = re.compile(r"completed step: (\d+), .*total_weights: (\d+), loss: (\S+), .*perplexity: (\S+)")


def losses(*outputs):
    """Return (loss, perplexity, number of targets that took loss) of each step in the outputs. No step may occur twice."""
    found = {}
    for output in outputs:
        for step, weights, loss, perplexity in STEP.findall(output):
            assert int(step) not in found, f"step {step} was run twice"
            found[int(step)] = loss, perplexity, int(weights)
    return found


def last_losses(out, run):
    """Return the losses of the last steps at full precision. MaxText's file of metrics lacks the steps before an evaluation."""
    last = max(out.glob(f"{run}-*.jsonl"))
    entries = [json.loads(line) for line in last.read_text().splitlines()]
    return {int(entry["step"]): entry["learning/loss"] for entry in entries if "learning/loss" in entry}


EVALUATED = re.compile(r"Completed eval after train step (\d+), loss=(\S+), perplexity=(\S+), total_weights=(\S+),")


def evaluations(output):
    return {int(step): found for step, *found in EVALUATED.findall(output)}


@pytest.fixture(scope="module")
def configs(request, tmp_path_factory):
    """The paths of a training config and of an evaluation config, each with its own corpus."""
    folder = tmp_path_factory.mktemp("data")
    for number, name in enumerate(("train", "eval")):
        if request.param == "windows":
            (folder / name).mkdir()
            for file in range(2):
                walk = np.random.default_rng(10 * number + file).integers(0, 3, LENGTH * 23 + 5).cumsum() % 250 + 3
                walk.astype(np.uint32).tofile(folder / name / f"{file}.npy")
            given = {"layout": "windows", "corpus": {"dtype": "uint32"}}
        else:
            write_olmo(folder / name, documents(173, number, high=250, longest=60), part_tokens=1500)
            given = {"corpus": {"format": "olmo", "dtype": "uint16", "eos_token_id": 2}}
        order = "olmo" if name == "train" else "sequential"
        config = sections(name, LENGTH, order=order, seed=7, global_batch_size=ROWS, **given)
        write_config(folder / f"{name}.json", config | {"transforms": ["shift_targets"]})
    return folder / "train.json", folder / "eval.json"


def keys(configs):
    return {"grain_sft_config": configs[0], "grain_sft_eval_config": configs[1]}


@pytest.mark.parametrize("configs", ["packed SFT"], indirect=True)
def test_meshes_that_divide_rows_and_the_sequence_have_the_losses_of_one_device(configs, tmp_path):
    """With context parallelism, MaxText itself puts the columns in its load-balanced order, or leaves them as they are."""
    given = keys(configs) | {"steps": 4, "eval_interval": -1}
    expected = losses(launch(tmp_path, "one", **given))
    meshes = [{"ici_fsdp_parallelism": 1, "ici_data_parallelism": 4}]
    context = {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 2}
    meshes += [context | {"context_parallel_load_balance": balance} for balance in (True, False)]
    for number, mesh in enumerate(meshes):
        run = launch(tmp_path, f"mesh-{number}", devices=4, per_device_batch_size=1, **given | mesh)
        for step, (loss, _, weights) in losses(run).items():
            assert weights == expected[step][2] and abs(float(loss) - float(expected[step][0])) <= 0.002
        assert len(losses(run)) == 4


@pytest.mark.parametrize("configs", ["windows", "packed SFT"], indirect=True)
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(configs, tmp_path):
    """The run "first" stops at step 4 of 8 and is resumed. The run "second" also stops at step 6."""
    whole = launch(tmp_path, "whole", steps=8, **keys(configs))
    expected = losses(whole)
    assert "from step 0 on" in whole  # the folder of checkpoints was empty
    assert sorted(expected) == list(range(8))
    assert float(expected[7][0]) < float(expected[0][0])

    stopped = launch(tmp_path, "first", steps=4, **keys(configs))
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    resumed = launch(tmp_path, "first", steps=8, **keys(configs))
    assert "from step 4 on" in resumed
    again = [launch(tmp_path, "second", steps=steps, **keys(configs)) for steps in (6, 8)]
    assert "from step 6 on" in again[1]
    assert losses(stopped, resumed) == losses(stopped, *again) == expected
    full = last_losses(tmp_path, "whole")
    assert {6, 7} <= full.keys()
    assert {step: full[step] for step in (6, 7)} == last_losses(tmp_path, "first") == last_losses(tmp_path, "second")

    evaluated = evaluations(whole)
    assert sorted(evaluated) == [0, 2, 4, 6]
    assert evaluations(stopped) | evaluations(resumed) == evaluated
    assert evaluations(stopped) | evaluations(again[0]) | evaluations(again[1]) == evaluated
    # The targets that took loss are those with a segment in our batches.
    pipeline = load(str(configs[0]))
    for step, (*_, weights) in expected.items():
        assert weights == np.count_nonzero(pipeline[step]["targets_segmentation"]), step
    pipeline = load(str(configs[1]))
    rows = np.arange(len(pipeline.source))
    assert len(rows) % ROWS  # so the last batch of an evaluation is filled
    targets = np.count_nonzero(pipeline.transforms[0].read(pipeline.source, rows)["targets_segmentation"])
    assert {float(weights) for *_, weights in evaluated.values()} == {targets}


@pytest.mark.parametrize("configs", ["packed SFT"], indirect=True)
def test_a_run_that_is_amended_has_the_losses_of_one_that_was_amended_from_the_start(configs, tmp_path):
    """The run stops at step 3, gets a skip at step 3 and withdrawn documents from step 5 on, and stops again at step 4."""
    amendments = [{"skip": {"from": 3, "steps": 2}}, {"withdraw": {"from": 5, "documents": [*range(0, 173, 3)]}}]
    stated = json.loads(configs[0].read_text()) | {"amendments": amendments}
    amended = write_config(configs[0].with_name("amended.json"), stated)
    given, changed = ({"grain_sft_config": path, "eval_interval": -1} for path in (configs[0], amended))
    expected = losses(launch(tmp_path, "whole", steps=7, **changed))
    pipeline = load(str(amended))
    for step, (*_, weights) in expected.items():
        assert weights == np.count_nonzero(pipeline[step]["targets_segmentation"]), step
    parts = [launch(tmp_path, "run", steps=3, **given)]
    parts += [launch(tmp_path, "run", steps=steps, **changed) for steps in (4, 7)]
    assert losses(*parts) == expected
    output = launch(tmp_path, "run", steps=8, fails=True, **given)
    assert "amendment 1 differs: here nothing; there from step 3: skip 2 steps" in output
    assert "Traceback" not in output and "completed step" not in output


@pytest.mark.parametrize("configs", ["windows"], indirect=True)
def test_keys_that_do_not_fit_the_batches_end_the_run_with_a_message(configs, tmp_path):
    """Each run ends before its first step, without a traceback."""
    cases = [
        ({"per_device_batch_size": 2}, "the global batch has 4 rows, but MaxText's global_batch_size_to_train_on is 2"),
        ({"max_target_length": 128}, "inputs has 64 tokens a row, but 128 by MaxText's max_target_length"),
        ({"vocab_size": 100}, "but MaxText's vocab_size is 100"),
        ({"grain_sft_eval_config": ""}, "grain_sft_eval_config is not given"),
    ]
    for changed, message in cases:
        output = launch(tmp_path, "wrong", steps=2, fails=True, **(keys(configs) | changed))
        assert f"grain_sft.integrations.maxtext: {configs[0].parent if 'eval' not in message else ''}" in output
        assert message in output
        assert "Traceback" not in output and "completed step" not in output


@pytest.mark.parametrize("configs", ["windows"], indirect=True)
def test_a_run_on_other_data_is_refused_unless_that_is_allowed(configs, tmp_path):
    launch(tmp_path, "run", steps=2, **keys(configs))
    other = put(json.loads(configs[0].read_text()), "sampler.seed", 8)
    given = keys(configs) | {"grain_sft_config": write_config(configs[0].with_name("other.json"), other)}
    output = launch(tmp_path, "run", steps=4, fails=True, **given)
    assert "sampler differs: " in output and "Traceback" not in output
    assert sorted(losses(launch(tmp_path, "run", "grain_sft_allow_other_data=true", steps=4, **given))) == [2, 3]


def test_maxtext_trains_on_the_corpus_of_the_page(tmp_path):
    Folders(tmp_path).run("text.md")
    [command] = [block.text for block in pages.blocks("text.md") if "grain_sft.integrations.maxtext" in block.text]
    folders = [str(Path(sys.executable).parent), os.environ["PATH"]]
    path = {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join([str(pages.DOCS.parent), *sys.path])}
    options = {"cwd": tmp_path / "text", "env": os.environ | path | {"JAX_PLATFORMS": "cpu"}, "text": True}
    words = ["bash", "-euo", "pipefail", "-c", command]
    result = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
    assert result.returncode == 0, result.stdout[-5000:]
    found = re.findall(r"completed step: (\d+), .*total_weights: (\d+), loss: (\S+),", result.stdout)
    assert [int(step) for step, _, _ in found] == list(range(20))
    assert {int(weights) for _, weights, _ in found} == {8 * 255}
    assert float(found[0][2]) > float(found[-1][2]) + 0.1
    assert "the data were read up to step 20 of 20" in result.stdout
