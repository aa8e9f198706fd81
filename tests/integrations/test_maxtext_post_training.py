"""MaxText's trainers that run on Tunix have the losses of an uninterrupted run after they are killed and resumed.

These tests take minutes:
python -m pytest -n0 -m maxtext tests/integrations/test_maxtext_post_training.py
"""

import importlib.util
import json
import random
import re
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import yaml
from batches import load, sections, write_config
from maxtext_runs import LENGTH, NEEDED, ROWS, STEPS, distillation_config, launch, write_texts, write_tokenizer
from sft_files import documents, make_pairs, write_olmo, write_pairs
from trainer_runs import losses

pytestmark = NEEDED

# Program text that prints for each step the hashes of the rows on this process's devices, and the number of targets for which
# MaxText counts a loss.
PRINT_ROWS = """
import zlib
import numpy
from grain_sft.integrations.maxtext.iterators import MaxTextBatches

following = MaxTextBatches.__next__

def printing_rows(self):
    step, batch = self.next_step, following(self)
    for shard in batch["inputs"].addressable_shards:
        for row, tokens in enumerate(numpy.asarray(shard.data), shard.index[0].start or 0):
            print("ROW", step, row, zlib.crc32(tokens.tobytes()), flush=True)
    return batch

MaxTextBatches.__next__ = printing_rows

from maxtext.trainers.post_train.hooks import BaseTrainingHooks

step_starts = BaseTrainingHooks.on_train_step_start

def printing_targets(self, trainer):
    step_starts(self, trainer)
    print("TARGETS", trainer.train_steps, int(self.train_metadata[trainer.train_steps]["total_weights"]), flush=True)

BaseTrainingHooks.on_train_step_start = printing_targets
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folder with the configs of training and of evaluation."""
    folder = tmp_path_factory.mktemp("data")
    for number, (name, order, count) in enumerate((("train", "olmo", 300), ("eval", "sequential", 40))):
        write_olmo(folder / name, documents(count, number, high=250, longest=60), part_tokens=1500)
        corpus = {"format": "olmo", "dtype": "uint16", "eos_token_id": 2}
        config = sections(name, LENGTH, corpus=corpus, order=order, seed=7, global_batch_size=ROWS)
        write_config(folder / f"{name}.json", config)
        answered = [pair for pair in make_pairs(count // 2, number) if pair[1] and pair[2]]  # ORPO needs both responses
        write_pairs(folder / f"{name}_pairs", answered)
        pairs = sections(f"{name}_pairs", LENGTH, layout="pairs", **config["sampler"])
        write_config(folder / f"{name}_pairs.json", pairs)
    write_tokenizer(folder / "tokenizer")
    write_texts(folder, 200)
    return folder


@pytest.fixture(scope="module")
def teacher(configs, tmp_path_factory):
    """Path of MaxText's config of a distillation, with a teacher that was trained for two steps."""
    out = tmp_path_factory.mktemp("teacher")
    launch(out, configs, "teacher", trainer="pre_train", steps=2, eval_interval=-1)
    return distillation_config(out, configs / "tokenizer", out / "teacher/checkpoints/1/items")


def source_of(name):
    """Return the text of a file of Tunix; "" where Tunix is not installed."""
    found = importlib.util.find_spec("tunix")
    return (Path(found.origin).parent / name).read_text() if found else ""


def trainer_if(runs, name, reason):
    """Return a parameter, the `name` of a trainer. Its tests are skipped unless `runs`."""
    return pytest.param(name, marks=pytest.mark.skipif(not runs, reason=f"MaxText's {reason}: docs/maxtext.md"))


ACCUMULATES = "grad_accumulator" in source_of("sft/peft_trainer.py")
DISTILLS = "_checkpointer" in source_of("sft/checkpoint_manager.py") and not ACCUMULATES
DISTILLATION = trainer_if(DISTILLS, "distill", "distillation does not run with this Tunix")
FINE_TUNING = trainer_if(ACCUMULATES, "sft", "train_sft does not accumulate with this Tunix")
TRAINERS = pytest.mark.parametrize("given", ["sft", "dpo", DISTILLATION], indirect=True)


@pytest.fixture
def given(request):
    """Options of `launch` for the trainer of a test."""
    base = request.getfixturevalue("teacher") if request.param == "distill" else None
    return {"trainer": request.param, "base": base}


def remove_unfinished(checkpoints):
    """Remove checkpoints that lack a commit time because of a kill. Later versions of Tunix can't list them."""
    for path in checkpoints.glob("*/_CHECKPOINT_METADATA"):
        if json.loads(path.read_text() or "{}").get("commit_timestamp_nsecs") is None:
            shutil.rmtree(path.parent)


def check_kills(out, configs, **given):
    """Check that a run that is killed ten times has the losses of a run that is never killed."""
    expected = losses(launch(out, configs, "whole", **given))
    assert sorted({step for kind, step, _ in expected if kind == "TRAIN"}) == list(range(STEPS))
    assert sorted({step for kind, step, _ in expected if kind == "EVAL"}) == list(range(0, STEPS + 1, 3))
    source = random.Random(5)
    kills = sorted(source.sample(range(1, STEPS), 10))
    outputs = []
    for at in kills:
        outputs.append(launch(out, configs, "killed", kill_at=at, pause=source.random() / 2, **given))
        remove_unfinished(out / "killed" / "checkpoints")
    outputs.append(launch(out, configs, "killed", **given))
    resumed = [min((step for kind, step, _ in losses(output) if kind == "TRAIN"), default=STEPS) for output in outputs]
    assert resumed == sorted(resumed) and resumed[-1] >= kills[-2]
    assert {key: loss for key, loss in losses(*outputs).items() if key in expected} == expected


@TRAINERS
def test_a_run_killed_at_random_steps_has_the_losses_of_an_uninterrupted_one(configs, tmp_path, given):
    check_kills(tmp_path, configs, **given)


def test_orpo_is_resumed_with_the_losses_of_an_uninterrupted_run(configs, tmp_path):
    given = {"trainer": "dpo", "dpo.algo": "orpo"}
    whole = losses(launch(tmp_path, configs, "whole", steps=6, **given))
    assert whole != losses(launch(tmp_path, configs, "dpo", steps=6, trainer="dpo"))
    outputs = [launch(tmp_path, configs, "stopped", steps=steps, **given) for steps in (2, 6)]
    assert {key: loss for key, loss in losses(*outputs).items() if key in whole} == whole
    assert min(step for kind, step, _ in losses(outputs[1]) if kind == "TRAIN") == 2


@pytest.mark.parametrize("given", [FINE_TUNING, "dpo", DISTILLATION], indirect=True)
def test_a_killed_run_that_accumulates_gradients_has_the_losses_of_an_uninterrupted_one(configs, tmp_path, given):
    keys = {"gradient_accumulation_steps": 2, "use_tunix_gradient_accumulation": True}
    if given["base"]:  # the teacher's config, which is read without the command line, needs the keys as well
        given["base"] = write_config(tmp_path / "distill.yml", yaml.safe_load(given["base"].read_text()) | keys)
    check_kills(tmp_path, configs, **given, **keys)


def batches_of(output):
    """Return hashes of the batches of MaxText's own loader, by step."""
    return dict(re.findall(r"^BATCH (\d+) (\d+)$", output, re.MULTILINE))


@pytest.mark.parametrize("trainer", ["sft", "dpo"])
def test_maxtexts_own_loader_begins_anew_after_a_restart(configs, tmp_path, trainer):
    """With MaxText's own loader, the losses of a killed run differ from those of a whole run (docs/maxtext.md)."""
    given = {"trainer": trainer, "stock": True, "eval_interval": -1, "checkpoint_period": 3, "steps": 8}
    whole = launch(tmp_path, configs, "whole", **given)
    launch(tmp_path, configs, "killed", kill_at=5, **given)
    resumed = launch(tmp_path, configs, "killed", **given)
    expected, batches = batches_of(whole), batches_of(resumed)
    assert list(expected) == list("012345678") and list(batches) == list("345678")  # batch 8 is loaded, not used
    assert list(batches.values()) == list(expected.values())[:6]  # it trains on the first batches again
    found = losses(resumed)
    assert not [step for step in range(3, 8) if found["TRAIN", step, 0] == losses(whole)["TRAIN", step, 0]]


@TRAINERS
def test_an_error_of_the_data_ends_the_process_with_its_message(configs, tmp_path, given):
    """The check gets a vocabulary of 249 ids, and the data have a token beyond it."""
    check = "from grain_sft.integrations.maxtext import checks; whole = checks.prepare\n"
    check += "checks.prepare = lambda vocabulary, *others: whole(249, *others)\n"
    output = launch(tmp_path, configs, "failed", fails=True, patches=check, **given)
    assert "MaxText's vocab_size is 249. Set vocab_size" in output


def rows_of(output):
    """Return hashes of the rows that a process trained on, by (step, row)."""
    return {(int(step), int(row)): int(crc) for step, row, crc in re.findall(r"^ROW (\d+) (\d+) (\d+)$", output, re.M)}


def expected_rows(configs, steps):
    """Return what `rows_of` and `targets_of` are expected to find in the output of a run of `steps`."""
    pipeline = load(str(configs / "train.json"))
    batches = {step: pipeline[step] for step in steps}
    inputs = {(step, row): tokens for step, batch in batches.items() for row, tokens in enumerate(batch["inputs"])}
    rows = {key: zlib.crc32(tokens.tobytes()) for key, tokens in inputs.items()}
    return rows, {step: np.count_nonzero(batch["targets_segmentation"]) for step, batch in batches.items()}


def targets_of(output):
    """Return the number of targets for which MaxText counts a loss, by step."""
    return {int(step): int(count) for step, count in re.findall(r"^TARGETS (\d+) (\d+)$", output, re.MULTILINE)}


def test_a_run_that_is_resumed_on_other_numbers_of_devices_has_the_same_batches(configs, tmp_path):
    first = 0
    for devices, last in ((2, 3), (1, 5), (4, 8)):
        flags = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        given = {"steps": last, "per_device_batch_size": ROWS // devices, "patches": PRINT_ROWS, "eval_interval": -1}
        output = launch(tmp_path, configs, "devices", environment=flags, **given)
        assert (rows_of(output), targets_of(output)) == expected_rows(configs, range(first, last))
        first = last


def test_two_processes_train_on_their_own_rows_and_one_process_resumes(configs, tmp_path):
    names = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1", "JOB_INDEX": "0"}
    names |= {"PROCESSES_IN_JOB": "2", "JAX_PROCESS_COUNT": "2"}
    given = {"patches": PRINT_ROWS, "eval_interval": -1}

    def process(index):
        environment = names | {"JOB_COMPLETION_INDEX": str(index)}
        options = {"steps": 4, "per_device_batch_size": ROWS // 2, "skip_jax_distributed_system": False, "fork": False}
        return launch(tmp_path, configs, "two", environment=environment, **options, **given)

    with ThreadPoolExecutor(2) as threads:
        first, second = map(rows_of, threads.map(process, range(2)))
    assert not first.keys() & second.keys()
    assert first | second == expected_rows(configs, range(4))[0]
    assert rows_of(launch(tmp_path, configs, "two", steps=7, **given)) == expected_rows(configs, range(4, 7))[0]
