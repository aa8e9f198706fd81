"""One run of the demo, in a process of its own: `python -m grain_sft.demo.train`.

It is told where to begin by a checkpoint or begins at step 0, and asks the pipeline for the batches from that step
on. It prints the record of every step as it appends it to its log, and nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

import grain_sft
from grain_sft.demo import checkpoint, log, model
from grain_sft.demo.checkpoint import State
from grain_sft.errors import GrainSftError

LEARNING_RATE = 6e-3
WARMUP = 10  # steps
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """One run.

    Attributes:
      config: of the pipeline, for `grain_sft.load`.
      folder: for its log and its checkpoints.
      vocab_size: of the tokenizer.
      steps: that the training has in all.
      checkpoint_every: steps.
      seed: of the parameters.
      resume: folder of checkpoints whose newest it goes on from; None begins at step 0.
    """

    config: Path
    folder: Path
    vocab_size: int
    steps: int
    checkpoint_every: int
    seed: int
    resume: Path | None = None

    @property
    def log(self) -> Path:
        """The run's records."""
        return self.folder / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        """Folder of the run's checkpoints."""
        return self.folder / "checkpoints"

    def to_arguments(self) -> list[str]:
        """The command line that `main` makes the same options of."""
        stated = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [f"--{name}={value}" for name, value in stated if value is not None]


def train(options: RunOptions) -> None:
    """Train from the newest checkpoint in `options.resume`, or from step 0, to the end.

    Raises:
      GrainSftError: no checkpoint to resume from, a loss that is no number, or a disk that can't be written to.
    """
    config = model.ModelConfig(options.vocab_size)
    start = 0
    if options.resume is None:
        state = checkpoint.init_state(config, options.seed)
    else:
        found = checkpoint.steps(options.resume)
        if not found:
            raise GrainSftError(f"{options.resume}: holds no checkpoint to resume from.")
        start = found[-1]
        state = checkpoint.load(options.resume, start)
    pipeline = grain_sft.load(options.config)
    batches = pipeline.iter(start_step=start)
    try:
        for step in range(start, options.steps):
            batch = next(batches)
            state, loss = _update(state, step, batch, config)
            record = log.Record(step, float(loss).hex(), log.batch_sha256(batch))
            if not math.isfinite(record.loss):
                raise GrainSftError(f"the loss at step {step} is {record.loss}: the training went astray.")
            log.append(options.log, record)
            print(record.to_json(), flush=True)
            if (step + 1) % options.checkpoint_every == 0:
                checkpoint.save(options.checkpoints, step + 1, state)
    finally:
        batches.close()


def update(state: State, step: int, batch: model.Batch, config: model.ModelConfig) -> tuple[State, jax.Array]:
    """One step of Adam, at a rate that rises over the first `WARMUP` steps: the new state, and the loss before it.

    Nothing but the arguments decides it; the optimiser's own count of steps is `step`.
    """
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`; the last line on stderr says what went wrong, if anything did."""
    parser = argparse.ArgumentParser(prog="python -m grain_sft.demo.train", description="One run of grain-sft demo.")
    for field in dataclasses.fields(RunOptions):
        kind = int if field.type == "int" else Path
        parser.add_argument(f"--{field.name}", type=kind, required=field.name != "resume")
    options = RunOptions(**vars(parser.parse_args(argv)))
    try:
        train(options)
    except BrokenPipeError:  # whoever started this is gone
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
    sys.exit(main())
