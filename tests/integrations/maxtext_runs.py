"""Run MaxText's trainers with a model of two layers, and write the data that its own loaders read."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
from batches import write_config
from tokenizers import Tokenizer, models, pre_tokenizers
from trainer_runs import PRINT_LOSSES, run

LENGTH, ROWS, STEPS = 64, 4, 12
_PLACES = [importlib.util.find_spec(name) for name in ("maxtext", "tunix")]
NEEDED = [pytest.mark.maxtext, pytest.mark.skipif(None in _PLACES, reason="MaxText is not installed: docs/maxtext.md")]
"""Marks of the tests that train in MaxText."""
MODEL = {
    "base_emb_dim": 32, "base_num_query_heads": 2, "base_num_kv_heads": 2, "base_mlp_dim": 64, "head_dim": 16,
    "base_num_decoder_layers": 2, "attention": "dot_product", "dtype": "float32", "vocab_size": 256, "hardware": "cpu",
    "learning_rate": 0.01, "learning_rate_schedule_steps": 20, "skip_jax_distributed_system": True,
    "enable_goodput_recording": False, "enable_tensorboard": False, "checkpoint_period": 1, "async_checkpointing": False,
    "eval_interval": 3, "max_target_length": LENGTH, "per_device_batch_size": ROWS, "steps": STEPS,
}  # fmt: skip
_BASES = {"pre_train": "base.yml", "sft": "post_train/sft.yml", "dpo": "post_train/dpo.yml"}
LAUNCHER = """
import runpy
runpy.run_module("grain_sft.integrations.maxtext", run_name="__main__")
"""
_STOCK = """
import importlib, sys, zlib
import numpy
from absl import app
from maxtext.trainers.post_train.hooks import BaseDataHooks

load = BaseDataHooks.load_next_train_batch

def printing_batches(self, trainer):
    batch = load(self, trainer)
    if batch is not None:
        data = b"".join(numpy.asarray(batch[key]).tobytes() for key in sorted(batch))
        print("BATCH", trainer.train_steps, zlib.crc32(data), flush=True)
    return batch

BaseDataHooks.load_next_train_batch = printing_batches
name = sys.argv[1]
app.run(importlib.import_module(f"maxtext.trainers.post_train.{name}.train_{name}").main, sys.argv[1:])
"""
"""Program text that runs MaxText's own command and prints the hash of each batch."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


def base_config(name):
    """Return the path of a config that MaxText ships."""
    (home,) = importlib.util.find_spec("maxtext").submodule_search_locations
    return Path(home) / "configs" / name


def distillation_config(folder, tokenizer, checkpoint):
    """Write a MaxText config of a distillation, and return its path. The teacher has the weights of `checkpoint`."""
    config = {"base_config": "post_train/distillation.yml", "student_overrides": {"model_name": "default"}} | MODEL
    config |= {"tokenizer_path": str(tokenizer), "tokenizer_type": "huggingface"}
    config["dataset_type"] = "olmo_grain"  # MaxText checks the teacher's config without the command line's keys
    config["teacher_overrides"] = {"model_name": "default", "load_parameters_path": str(checkpoint)}
    return write_config(folder / "distill.yml", config)


def write_tokenizer(folder):
    """Write a tokenizer of words that MaxText's loaders can read."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", "user", "assistant", *(f"w{number}" for number in range(200))]
    tokenizer = Tokenizer(models.WordLevel({word: id for id, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE} | special
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_texts(folder, count):
    """Write `chats.jsonl` and `pairs.jsonl`, as MaxText's own loaders of `train_sft` and `train_dpo` read them."""
    draw = random.Random(1)

    def words(most):
        return " ".join(f"w{draw.randrange(200)}" for _ in range(draw.randint(1, most)))

    with open(folder / "chats.jsonl", "w") as chats, open(folder / "pairs.jsonl", "w") as pairs:
        for _ in range(count):
            turns = [{"role": "user", "content": words(8)}, {"role": "assistant", "content": words(20)}]
            chats.write(json.dumps({"messages": turns}) + "\n")
            pairs.write(json.dumps({"prompt": words(8), "chosen": words(20), "rejected": words(20)}) + "\n")


def launch(out, folder, name, *, trainer="sft", base=None, stock=False, patches="", environment=(), **options):
    """Run a trainer on the data in `folder`; return what it printed. `options` are those of `run`, and keys of MaxText.

    The trainer reads the pipelines of the configs in `folder`. With `stock`, MaxText's own loader reads the texts instead."""
    of_run = {key: options.pop(key) for key in ("kill_at", "pause", "fails", "fork") if key in options}
    given = MODEL | {"run_name": name, "base_output_directory": out}
    if trainer == "dpo" or stock:
        given |= {"tokenizer_path": folder / "tokenizer", "tokenizer_type": "huggingface"}
    if trainer == "dpo":
        given |= {"model_name": "qwen3-0.6b", "override_model_config": True}
    if stock:
        file, columns = ("pairs", "prompt,chosen,rejected") if trainer == "dpo" else ("chats", "messages")
        given |= {"dataset_type": "hf", "hf_path": "json", "train_split": "train", "train_data_columns": f"[{columns}]"}
        given |= {"hf_train_files": folder / f"{file}.jsonl", "grain_worker_count": 0}  # a worker would outlive a kill
    else:
        kind = "_pairs" if trainer == "dpo" else ""
        for key, file in (("config", "train"), ("eval_config", "eval")):
            given[f"grain_sft_{key}"] = folder / f"{file}{kind}.json"
    keys = (f"{key}={value}" for key, value in (given | options).items())
    arguments = [trainer, base or base_config(_BASES[trainer]), *keys]
    program = PRINT_LOSSES + patches + (_STOCK if stock else LAUNCHER)
    return run(program, arguments, cache=folder / "cache", environment=dict(environment), **of_run)
