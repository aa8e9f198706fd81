"""Training process of the demo: `python -m grain_sft.demo.train OPTIONS`. OPTIONS is a `RunOptions` as JSON.

The process trains from step 0, or from the step of a checkpoint, and prints one record per step. A checkpoint is parameters
and optimizer moments, and in its name the number of steps done: it holds no state of the data.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import sys
import traceback
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import grain_sft
from grain_sft.demo import model, records
from grain_sft.demo.child import RunOptions
from grain_sft.demo.folder import newest_step, writing
from grain_sft.demo.model import ModelConfig, Params, init_params
from grain_sft.errors import GrainSftError, StorageError
from grain_sft.storage import atomic_write

LEARNING_RATE = 6e-3
WARMUP = 10  # steps
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


@dataclasses.dataclass(frozen=True)
class State:
    """What a step changes: parameters, and Adam's running means of the gradients and of their squares; all float32."""

    params: Params
    mean: Params
    square: Params


jax.tree_util.register_dataclass(State, ["params", "mean", "square"], [])


def init_state(config: ModelConfig, seed: int) -> State:
    """Return the state before step 0."""
    params = init_params(config, seed)
    zeros = [{name: jnp.zeros(value.shape, jnp.float32) for name, value in params.items()} for _ in range(2)]
    return State(params, *zeros)


def save(folder: Path, step: int, state: State) -> None:
    """Write the checkpoint after `step` steps, which appears whole or not at all."""
    parts = vars(state).items()
    arrays = {f"{part}/{name}": np.asarray(value) for part, params in parts for name, value in params.items()}
    path = folder / f"step-{step:08d}.npz"
    content = io.BytesIO()  # np.savez leaves its zip file open on a disk that is full, and that prints
    np.savez(content, **arrays)  # type: ignore[arg-type]
    with writing(path), atomic_write(path, "wb") as file:
        file.write(content.getbuffer())


def load(folder: Path, step: int) -> State:
    """Return the state after `step` steps."""
    path = folder / f"step-{step:08d}.npz"
    parts: dict[str, Params] = {field.name: {} for field in dataclasses.fields(State)}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                part, name = key.split("/")
                parts[part][name] = jnp.asarray(arrays[key])
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise StorageError(f"{path}: can't be read as a checkpoint ({error}).") from error
    return State(**parts)


def train(options: RunOptions) -> None:
    """Train to the last step, from the newest checkpoint in `options.resume` or from step 0."""
    config = ModelConfig(options.vocab_size)
    if options.resume is None:
        start, state = 0, init_state(config, options.seed)
    else:
        start = newest_step(Path(options.resume))
        state = load(Path(options.resume), start)
    batches = grain_sft.load(options.config).iter(start_step=start)
    try:
        for step in range(start, options.steps):
            batch = next(batches)
            state, loss = _update(state, step, batch, config)
            record = records.Record(step, float(loss).hex(), records.batch_sha256(batch))
            if not math.isfinite(record.loss):
                raise GrainSftError(f"the loss at step {step} is {record.loss}: the training diverged.")
            print(record.to_json(), flush=True)
            if (step + 1) % options.checkpoint_every == 0:
                save(options.checkpoints, step + 1, state)
    finally:
        batches.close()


def update(state: State, step: int, batch: model.Batch, config: ModelConfig) -> tuple[State, jax.Array]:
    """Return the state after one step of Adam, and the loss before it. The learning rate rises for `WARMUP` steps."""
    loss, gradients = jax.value_and_grad(model.loss)(state.params, config, batch)
    done = jnp.asarray(step, jnp.float32) + 1
    rate = LEARNING_RATE * jnp.minimum(1.0, done / WARMUP)
    mean = jax.tree.map(lambda old, new: BETA1 * old + (1 - BETA1) * new, state.mean, gradients)
    square = jax.tree.map(lambda old, new: BETA2 * old + (1 - BETA2) * new * new, state.square, gradients)

    def moved(param: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
        unbiased = first / (1 - BETA1**done), second / (1 - BETA2**done)
        return param - rate * unbiased[0] / (jnp.sqrt(unbiased[1]) + EPSILON)

    return State(jax.tree.map(moved, state.params, mean, square), mean, square), loss


_update = jax.jit(update, static_argnames="config")


def main(options: str) -> int:
    """Train with `options` in JSON. On failure, the last line on stderr is the reason."""
    try:
        train(RunOptions(**json.loads(options)))
    except BrokenPipeError:  # the parent has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except GrainSftError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
