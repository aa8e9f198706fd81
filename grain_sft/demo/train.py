"""Training process of the demo: `python -m grain_sft.demo.train OPTIONS`. OPTIONS is a `RunOptions` as JSON.

The process trains from step 0, or from the step of a checkpoint, and prints one record per step.
"""

from __future__ import annotations

import json
import math
import os
import sys
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp

import grain_sft
from grain_sft.demo import checkpoint, model, records
from grain_sft.demo.checkpoint import State
from grain_sft.demo.child import RunOptions
from grain_sft.demo.folder import newest_step
from grain_sft.errors import GrainSftError

LEARNING_RATE = 6e-3
WARMUP = 10  # steps
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


def train(options: RunOptions) -> None:
    """Train to the last step, from the newest checkpoint in `options.resume` or from step 0."""
    config = model.ModelConfig(options.vocab_size)
    if options.resume is None:
        start, state = 0, checkpoint.init_state(config, options.seed)
    else:
        start = newest_step(Path(options.resume))
        state = checkpoint.load(Path(options.resume), start)
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
                checkpoint.save(options.checkpoints, step + 1, state)
    finally:
        batches.close()


def update(state: State, step: int, batch: model.Batch, config: model.ModelConfig) -> tuple[State, jax.Array]:
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
