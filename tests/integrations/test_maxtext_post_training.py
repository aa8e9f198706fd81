"""MaxText's trainers that run on Tunix, killed and resumed. Takes minutes:

python -m pytest -n0 -m maxtext tests/integrations/test_maxtext_post_training.py
"""

import importlib.util
import json
import random
import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from pair_files import make_pairs, write_pairs
from sft_files import documents, write_olmo
from tokenizers import Tokenizer, models
from trainer_runs import PRINT_LOSSES, losses, run

import grain_sft
from grain_sft import Host

pytestmark = [
    pytest.mark.maxtext,
    pytest.mark.skipif(
        importlib.util.find_spec("tunix") is None or importlib.util.find_spec("maxtext") is None,
        reason="maxtext is not installed: pip install '.[maxtext]', Python 3.12 (docs/maxtext.md)",
    ),
]

LENGTH, ROWS, STEPS = 64, 4, 12
MODEL = {
    "base_emb_dim": 32, "base_num_query_heads": 2, "base_num_kv_heads": 2, "base_mlp_dim": 64, "head_dim": 16,
    "base_num_decoder_layers": 2, "attention": "dot_product", "dtype": "float32", "vocab_size": 256, "hardware": "cpu",
    "learning_rate": 0.01, "learning_rate_schedule_steps": 20, "skip_jax_distributed_system": True,
    "enable_goodput_recording": False, "enable_tensorboard": False, "checkpoint_period": 1, "async_checkpointing": False,
    "eval_interval": 3, "max_target_length": LENGTH, "per_device_batch_size": ROWS, "steps": STEPS,
}  # fmt: skip
BASES = {"pre_train": "base.yml", "sft": "post_train/sft.yml", "dpo": "post_train/dpo.yml"}
LAUNCHER = """
import sys
from grain_sft.integrations.maxtext import main
sys.exit(main(sys.argv[1:]))
"""
# The data from their beginning, as MaxText's own loaders give them after a restart.
STOCK = """
from grain_sft.integrations.maxtext import iterators, launcher
iterators.continue_at = launcher.continue_at = lambda *_: None
"""
# The rows of each batch that lie on this process's devices.
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
"""


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Folder with the configs of training and of evaluation."""
    folder = tmp_path_factory.mktemp("data")
    for number, (name, order, count) in enumerate((("train", "olmo", 300), ("eval", "sequential", 40))):
        write_olmo(folder / name, documents(count, number, high=250, longest=60), part_tokens=1500)
        config = {
            "corpus": {"path": name, "format": "olmo", "dtype": "uint16", "eos_token_id": 2},
            "layout": {"kind": "packed", "sequence_length": LENGTH},
            "sampler": {"order": order, "seed": 7, "global_batch_size": ROWS},
        }
        (folder / f"{name}.json").write_text(json.dumps(config))
        write_pairs(folder / f"{name}_pairs", make_pairs(count // 2, number))
        pairs = {"corpus": {"path": f"{name}_pairs"}, "layout": {"kind": "pairs", "sequence_length": LENGTH}}
        (folder / f"{name}_pairs.json").write_text(json.dumps(config | pairs))
    once = {"inherits": "train.json", "sampler": {"order": "shuffle", "epochs": 1}}
    (folder / "once.json").write_text(json.dumps(once))
    (folder / "tokenizer").mkdir()
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3}, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


@pytest.fixture(scope="module")
def teacher(configs, tmp_path_factory):
    """Path of MaxText's config of a distillation, with a teacher that was trained for two steps."""
    out = tmp_path_factory.mktemp("teacher")
    launch(out, configs, "teacher", trainer="pre_train", steps=2, eval_interval=-1)
    path = f"{out}/teacher/checkpoints/1/items"
    config = {"base_config": "post_train/distillation.yml", "student_overrides": {"model_name": "default"}} | MODEL
    config |= {"tokenizer_path": str(configs / "tokenizer"), "tokenizer_type": "huggingface"}
    config["dataset_type"] = "olmo_grain"  # the teacher's config is checked without the command line
    config["teacher_overrides"] = {"model_name": "default", "load_parameters_path": path}
    (out / "distill.yml").write_text(json.dumps(config))  # YAML is a superset of JSON
    return out / "distill.yml"


def launch(out, configs, name, *, trainer="sft", base=None, patches="", environment=(), **options):
    """Run the launcher; return what it printed. `options` are those of `run`, and keys of MaxText."""
    of_run = {key: options.pop(key) for key in ("kill_at", "pause", "fails") if key in options}
    kind = "_pairs" if trainer == "dpo" else ""
    given = MODEL | {"run_name": name, "base_output_directory": out, "grain_sft_config": configs / f"train{kind}.json"}
    given |= {"grain_sft_eval_config": configs / f"eval{kind}.json"}
    if trainer == "dpo":
        given |= {
            "model_name": "qwen3-0.6b",
            "override_model_config": True,
            "tokenizer_path": configs / "tokenizer",
            "tokenizer_type": "huggingface",
        }
    (folder,) = importlib.util.find_spec("maxtext").submodule_search_locations
    base = base or Path(folder) / "configs" / BASES[trainer]
    arguments = [trainer, base, *(f"{key}={value}" for key, value in (given | options).items())]
    program = PRINT_LOSSES + patches + LAUNCHER
    return run(program, arguments, cache=configs / "cache", environment=dict(environment), **of_run)


def source_of(name):
    """Return the text of one of Tunix's files; "" where Tunix is not installed."""
    found = importlib.util.find_spec("tunix")
    return (Path(found.origin).parent / name).read_text() if found else ""


DISTILLATION = pytest.param(
    "distill",
    marks=pytest.mark.skipif(
        "_checkpointer" not in source_of("sft/checkpoint_manager.py")
        or "grad_accumulator" in source_of("sft/peft_trainer.py"),
        reason="MaxText's distillation does not run with this Tunix: docs/maxtext.md",
    ),
)
TRAINERS = pytest.mark.parametrize("given", ["sft", "dpo", DISTILLATION], indirect=True)


@pytest.fixture
def given(request):
    """Options of `launch` for the trainer of a test."""
    base = request.getfixturevalue("teacher") if request.param == "distill" else None
    return {"trainer": request.param, "base": base}


def check_kills(out, configs, **given):
    """Check that a run that is killed at ten steps has the losses of a run that is not."""
    expected = losses(launch(out, configs, "whole", **given))
    assert sorted({step for kind, step, _ in expected if kind == "TRAIN"}) == list(range(STEPS))
    assert sorted({step for kind, step, _ in expected if kind == "EVAL"}) == list(range(0, STEPS + 1, 3))
    source = random.Random(5)
    kills = sorted(source.sample(range(1, STEPS), 10))
    outputs = [launch(out, configs, "killed", kill_at=at, pause=source.random() / 2, **given) for at in kills]
    outputs.append(launch(out, configs, "killed", **given))
    resumed = [min((step for kind, step, _ in losses(output) if kind == "TRAIN"), default=STEPS) for output in outputs]
    assert resumed == sorted(resumed) and resumed[-1] >= kills[-2]
    assert {key: loss for key, loss in losses(*outputs).items() if key in expected} == expected


@TRAINERS
def test_a_run_killed_at_random_steps_has_the_losses_of_an_uninterrupted_one(configs, tmp_path, given):
    check_kills(tmp_path, configs, **given)


@pytest.mark.skipif(
    "grad_accumulator" not in source_of("sft/peft_trainer.py"),
    reason="MaxText's train_sft does not accumulate with this Tunix: docs/maxtext.md",
)
def test_a_run_that_accumulates_has_the_losses_of_an_uninterrupted_one(configs, tmp_path):
    check_kills(tmp_path, configs, gradient_accumulation_steps=2, use_tunix_gradient_accumulation=True)


def test_data_that_begin_anew_after_a_restart_are_found(configs, tmp_path):
    expected = losses(launch(tmp_path, configs, "whole", steps=4))
    launch(tmp_path, configs, "stock", steps=2)
    resumed = losses(launch(tmp_path, configs, "stock", steps=4, patches=STOCK))
    assert all(resumed["TRAIN", step, 0] != expected["TRAIN", step, 0] for step in (2, 3))


@TRAINERS
def test_data_that_fail_end_the_process_with_their_sentence(configs, tmp_path, given):
    """A token beyond the vocabulary, in the middle of the run."""
    check = "from grain_sft.integrations.maxtext import checks; whole = checks.prepare\n"
    check += "checks.prepare = lambda vocabulary, *others: whole(249, *others)\n"
    output = launch(tmp_path, configs, "failed", fails=True, patches=check, **given)
    assert "MaxText's vocab_size is 249. Set vocab_size" in output.splitlines()[-1]


def test_data_that_end_before_the_last_step_are_refused(configs, tmp_path):
    output = launch(tmp_path, configs, "long", fails=True, steps=1000, grain_sft_config=configs / "once.json")
    assert re.search(r"the data end after \d+ steps, but MaxText's steps is 1000", output.splitlines()[-1])


def rows_of(output):
    """Hashes of the rows that a process trained on, by step and row."""
    return {(int(step), int(row)): int(crc) for step, row, crc in re.findall(r"^ROW (\d+) (\d+) (\d+)$", output, re.M)}


def test_two_processes_train_on_their_own_rows_and_one_process_resumes(configs, tmp_path):
    names = {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1",
        "JOB_INDEX": "0",
        "PROCESSES_IN_JOB": "2",
        "JAX_PROCESS_COUNT": "2",
    }
    given = {"patches": PRINT_ROWS, "eval_interval": -1}

    def process(index):
        environment = names | {"JOB_COMPLETION_INDEX": str(index)}
        options = {"steps": 4, "per_device_batch_size": ROWS // 2, "skip_jax_distributed_system": False}
        return launch(tmp_path, configs, "two", environment=environment, **options, **given)

    with ThreadPoolExecutor(2) as threads:
        first, second = map(rows_of, threads.map(process, range(2)))
    pipeline = grain_sft.load(str(configs / "train.json"), host=Host(0, 1))

    def expected(steps):
        inputs = {(step, row): tokens for step in steps for row, tokens in enumerate(pipeline[step]["inputs"])}
        return {key: zlib.crc32(np.ascontiguousarray(tokens).tobytes()) for key, tokens in inputs.items()}

    assert not first.keys() & second.keys()
    assert first | second == expected(range(4))
    resumed = rows_of(launch(tmp_path, configs, "two", steps=7, **given))
    assert resumed == expected(range(4, 7))
