"""Tunix's trainer gets batches that continue where a run stopped, and a loss that keeps packed documents apart.

The tests that run the trainer take a minute: python -m pytest -n0 -m maxtext tests/integrations
"""

import contextlib
import functools
import importlib.util
import json
import random
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import load, sections
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sft_files import documents, write_olmo
from trainer_runs import PRINT_LOSSES, losses, run

from grain_sft.errors import PipelineError
from grain_sft.integrations.jax_arrays import GlobalBatches
from grain_sft.integrations.tunix import Evaluation, packed_loss, token_losses, training

LENGTH = 64


def config_of(folder, **layout):
    corpus = {"format": "olmo", "dtype": "uint16", "eos_token_id": 2}
    sampler = {"order": "sequential", "epochs": 1, "last_batch": "fill"}
    return sections(folder, LENGTH, corpus=corpus, layout={"kind": "packed", **layout}, **sampler)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tunix")
    write_olmo(folder, documents(60, 3, high=250, longest=60), part_tokens=900)
    return folder


@pytest.fixture
def batches(corpus):
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    with contextlib.closing(GlobalBatches(load(config_of(corpus)), sharding)) as batches:
        yield batches


def trainer(iter_steps, folder=None, managed=False):
    """Return an object with those attributes of a PeftTrainer that `training` reads."""
    config = types.SimpleNamespace(checkpoint_root_directory=folder)
    return types.SimpleNamespace(iter_steps=iter_steps, is_managed_externally=managed, config=config)


def numbers(found):
    """Return a number that identifies each batch, the sum of its inputs; None for an empty batch."""
    return [int(np.asarray(batch["inputs"]).astype(np.int64).sum()) if batch else None for batch in found]


def test_training_continues_after_the_batches_that_tunix_drops(batches):
    whole = numbers(training(batches, trainer(0)))
    assert None not in whole and len(whole) == batches.pipeline.num_steps
    assert numbers(training(batches, trainer(3))) == [None] * 3 + whole[3:]
    assert numbers(training(batches, trainer(3, managed=True))) == whole[3:]


def test_training_refuses_a_checkpoint_of_other_data(batches, corpus):
    folder = "memory://tunix"
    next(training(batches, trainer(0, folder)))
    next(training(batches, trainer(2, folder)))
    others = GlobalBatches(load(config_of(corpus, sequence_length=32)), batches.sharding)
    with pytest.raises(PipelineError, match="of a run on other data"):
        next(training(others, trainer(2, f"{folder}/")))
    assert next(training(others, trainer(2, folder), allow_other_data=True)) == {}
    others.close()


def test_each_evaluation_begins_at_the_first_batch(batches):
    evaluation = Evaluation(batches)
    whole = numbers(evaluation)
    next(iter(evaluation))
    assert numbers(evaluation) == whole


def test_an_evaluation_that_never_ends_is_refused(batches, corpus):
    endless = config_of(corpus)
    del endless["sampler"]["epochs"], endless["sampler"]["last_batch"]
    with pytest.raises(PipelineError, match=r"the pipeline never ends.* Set sampler.epochs: 1"):
        Evaluation(GlobalBatches(load(endless), batches.sharding))


def attention(seed):
    """Return a model of one attention layer with rotary positions. It takes the arguments of Tunix's models."""
    keys = jax.random.split(jax.random.key(seed), 5)
    embed, query, key, value = (jax.random.normal(each, (256, 32)) / 6 for each in keys[:4])
    out = jax.random.normal(keys[4], (32, 256))

    def turned(x, positions):
        angle = positions[..., None] * 10.0 ** -jnp.arange(0, 4, 0.25)
        (left, right), cos, sin = jnp.split(x, 2, -1), jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)

    def model(tokens, positions, cache, mask):
        x = embed[tokens]
        q, k = turned(x @ query[:32], positions), turned(x @ key[:32], positions)
        weights = jax.nn.softmax(jnp.where(mask, q @ k.mT / 6, -1e30))
        return (x + weights @ (x @ value[:32])) @ out, cache

    return model


class Scaled(nnx.Module):
    """A Flax module with one parameter, by which it scales the logits of `model`."""

    def __init__(self, model):
        self.model, self.scale = model, nnx.Param(jnp.ones(()))

    def __call__(self, *arguments):
        logits, cache = self.model(*arguments)
        return logits * self.scale, cache


def losses_of_documents(pipeline, model):
    """Return the summed losses of each document, by the bytes of its tokens."""
    found, losses_of = {}, jax.jit(functools.partial(token_losses, model))
    for batch in pipeline.iter():
        losses = np.asarray(losses_of(batch))
        for row, segments in enumerate(batch["inputs_segmentation"]):
            for segment in range(1, segments.max(initial=0) + 1):
                here = segments == segment
                found[batch["inputs"][row, here].tobytes()] = losses[row, here].sum()
    return found


def test_the_losses_of_documents_are_the_same_in_packed_rows_and_in_rows_of_their_own(corpus):
    model = attention(1)
    packed = losses_of_documents(load(config_of(corpus)), model)
    padded = losses_of_documents(load(config_of(corpus, kind="padded", min_tokens=1)), model)
    assert packed.keys() == padded.keys() and len(packed) > 50
    np.testing.assert_allclose([packed[key] for key in padded], list(padded.values()), rtol=1e-5, atol=1e-5)
    assert max(packed.values()) > 1


def test_the_loss_is_the_mean_over_targets_that_take_loss(batches):
    model, batch = attention(2), next(batches)
    count = int((batch["targets_segmentation"] != 0).sum())
    assert 0 < count < int((batch["inputs_segmentation"] != 0).sum())
    expected = float(jax.jit(functools.partial(token_losses, model))(batch).sum()) / count
    loss_of = jax.jit(functools.partial(packed_loss, model))
    assert float(loss_of(**batch)) == pytest.approx(expected, rel=1e-6)
    loss, gradient = nnx.value_and_grad(packed_loss)(Scaled(model), **batch)  # as Tunix calls it
    assert float(loss) == pytest.approx(expected, rel=1e-6) and float(gradient.scale.get_value())
    assert float(loss_of(**{**batch, "targets_segmentation": jnp.zeros_like(batch["targets_segmentation"])})) == 0


PROGRAM = (
    PRINT_LOSSES
    + """
import json, sys
import jax, numpy as np, optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tunix.models.llama3 import model as llama3
from tunix.sft.peft_trainer import TrainingConfig
import orbax.checkpoint as ocp
import grain_sft
from grain_sft.integrations.jax_arrays import GlobalBatches
from grain_sft.integrations.tunix import Evaluation, packed_loss, training

config, folder, accumulation, steps = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sizes = dict(num_layers=2, vocab_size=256, embed_dim=32, hidden_dim=64, num_heads=2, head_dim=16, num_kv_heads=2)
model = llama3.Llama3(llama3.ModelConfig(**sizes, rope_theta=10000, norm_eps=1e-5), rngs=nnx.Rngs(0))
mesh = Mesh(np.array(jax.devices()).reshape(1, 1), ("fsdp", "tp"))
sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
def batches(config):
    return GlobalBatches(grain_sft.load(config, host=grain_sft.Host(0, 1)), sharding)
options = TrainingConfig(
    eval_every_n_steps=3, max_steps=steps, gradient_accumulation_steps=accumulation, checkpoint_root_directory=folder,
    checkpointing_options=ocp.CheckpointManagerOptions(save_interval_steps=1, enable_async_checkpointing=False),
)
with mesh:
    trainer = PeftTrainer(model, optax.adam(0.01), options).with_loss_fn(packed_loss)
    print("RESUMED", trainer.train_steps, flush=True)
    endless = config | {"sampler": {"order": "shuffle", "seed": 5, "global_batch_size": 4}}
    trainer.train(training(batches(endless), trainer), Evaluation(batches(config)))
"""
)


@pytest.mark.maxtext
@pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="Tunix is not installed: docs/tunix.md")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_of_tunix_that_is_killed_has_the_losses_of_an_uninterrupted_one(corpus, tmp_path, accumulation):
    steps, source = 12, random.Random(accumulation)

    def ran(name, **options):
        arguments = [json.dumps(config_of(corpus)), tmp_path / name, accumulation, steps]
        return run(PROGRAM, arguments, cache=tmp_path / "cache", **options)

    expected = losses(ran("whole"))
    train = [key for key in expected if key[0] == "TRAIN"]
    assert sorted(train) == [("TRAIN", step, number) for step in range(steps) for number in range(accumulation)]
    kills = sorted(source.sample(range(1, steps), 10 if accumulation == 1 else 4))
    outputs = [ran("killed", kill_at=step, pause=source.random() / 2) for step in kills]
    outputs.append(ran("killed"))
    resumed = [int(re.search(r"^RESUMED (\d+)$", output, re.MULTILINE)[1]) for output in outputs]
    assert resumed == sorted(resumed) and resumed[-1] > 0
    assert {key: loss for key, loss in losses(*outputs).items() if key in expected} == expected
