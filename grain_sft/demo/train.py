"""Training process of the demo: `python -m grain_sft.demo.train OPTIONS`, with `Options` as JSON.

The model is a decoder-only transformer of one block in float32.

The process prints one record per step. A checkpoint contains the parameters and the optimizer's moments, but nothing about the
data.
"""

import hashlib
import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import numpy.typing as npt
from jax.example_libraries import optimizers

import grain_sft
from grain_sft.demo.corpus import VOCAB_SIZE
from grain_sft.demo.run import Options, Record, newest_step
from grain_sft.errors import GrainSftError
from grain_sft.storage import write_bytes

Params = dict[str, jax.Array]
Batch = Mapping[str, Any]
"""Arrays [rows, L] of `ShiftTargets`."""

HEADS = 4
HIDDEN = 4  # width of the MLP's hidden layer, as a multiple of the model's width
_ROPE_BASE = 10_000.0

LEARNING_RATE = 6e-3
WARMUP = 10  # number of steps in which the learning rate grows
ADAM = optimizers.adam(lambda step: LEARNING_RATE * jnp.minimum(1.0, (step + 1) / WARMUP), b1=0.9, b2=0.95)
State = optimizers.OptimizerState
"""Parameters, and Adam's running means of the gradients and of their squares; all float32."""


def init_params(vocab_size: int, seed: int, width: int = 128) -> Params:
    """Return float32 parameters. `embedding` [vocab, width] is also the output matrix. Each head needs an even width."""
    shapes = {
        "embedding": (vocab_size, width),
        "attention_in": (width, 3 * width),
        "attention_out": (width, width),
        "mlp_in": (width, HIDDEN * width),
        "mlp_out": (HIDDEN * width, width),
    }
    generator = np.random.Generator(np.random.PCG64(seed))
    params = {}
    for name, shape in shapes.items():
        scale = np.float32(1 / math.sqrt(width if name == "embedding" else shape[0]))
        params[name] = jnp.asarray(generator.standard_normal(shape, np.float32) * scale)
    return params


def logits(params: Params, batch: Batch) -> jax.Array:
    """Return float32 [rows, L, vocab], the logits of the next token.

    A token attends to itself and to the earlier tokens of its segment.
    """
    segments = batch["inputs_segmentation"]
    x = params["embedding"][batch["inputs"]]
    rows, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), jnp.bool_)) & (segments[:, :, None] == segments[:, None, :])
    mixed = (_normed(x) @ params["attention_in"]).reshape(rows, length, 3, HEADS, width // HEADS)
    query = _rotated(mixed[:, :, 0], batch["inputs_position"])
    key = _rotated(mixed[:, :, 1], batch["inputs_position"])
    value = mixed[:, :, 2]
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
    x = x + attended.reshape(rows, length, width) @ params["attention_out"]
    x = x + jax.nn.gelu(_normed(x) @ params["mlp_in"]) @ params["mlp_out"]
    return _normed(x) @ params["embedding"].T


def loss(params: Params, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy of the targets, in nats.

    Targets with a `targets_segmentation` of 0 do not count. If no target counts, return 0.
    """
    scores = logits(params, batch)
    target_scores = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(scores, axis=-1) - target_scores
    takes_loss = batch["targets_segmentation"] != 0
    return jnp.sum(jnp.where(takes_loss, nats, 0.0)) / jnp.maximum(takes_loss.sum(), 1)


def _normed(x: jax.Array) -> jax.Array:
    """Return x divided by the root mean square of its last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Return `x`, float32 [rows, L, heads, head width], with rotary position embeddings.

    Elements i and i + head width / 2 of a head are the coordinates of a point. The point is rotated by the token's position
    times frequency i.
    """
    frequencies = _ROPE_BASE ** (-jnp.arange(0, x.shape[-1], 2, dtype=jnp.float32) / x.shape[-1])
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)


def save(folder: Path, step: int, state: State) -> None:
    """Write the checkpoint after `step` steps atomically."""
    # np.savez(path) would leave a zip file open on a full disk
    content = io.BytesIO()
    np.savez(content, *map(np.asarray, jax.tree.leaves(state)))
    write_bytes(str(folder / f"step-{step:08d}.npz"), content.getvalue())


def load(folder: Path, step: int, initial: State) -> State:
    """Return the state after `step` steps, with the structure of `initial`."""
    with np.load(folder / f"step-{step:08d}.npz", allow_pickle=False) as arrays:
        state: State = jax.tree.unflatten(jax.tree.structure(initial), list(map(jnp.asarray, arrays.values())))
    return state


def train(options: Options) -> None:
    """Train from the newest checkpoint in `options.resume`, or from step 0."""
    start, state = 0, ADAM.init_fn(init_params(VOCAB_SIZE, options.seed))
    if options.resume is not None:
        start = newest_step(options.resume)
        state = load(Path(options.resume), start, state)
    batches = grain_sft.load(options.config).iter(start_step=start)
    try:
        for step in range(start, options.steps):
            batch = next(batches)
            state, nats = update(state, step, batch)
            record = Record(step, float(nats), batch_sha256(batch))
            if not math.isfinite(record.loss):
                raise GrainSftError(f"the loss at step {step} is {record.loss}: the training diverged.")
            print(msgspec.json.encode(record).decode(), flush=True)
            if (step + 1) % (options.steps // 3) == 0:
                save(Path(options.folder), step + 1, state)
    finally:
        batches.close()


def batch_sha256(batch: Mapping[str, npt.NDArray[Any]]) -> str:
    """Return a hash of the names, dtypes, shapes and values of the arrays of a batch."""
    digest = hashlib.sha256()
    for name in sorted(batch):
        array = np.ascontiguousarray(batch[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}\0".encode())
        digest.update(array.data)
    return digest.hexdigest()


@jax.jit
def update(state: State, step: int, batch: Batch) -> tuple[State, jax.Array]:
    """Return the state after a step, and the loss before it."""
    nats, gradients = jax.value_and_grad(loss)(ADAM.params_fn(state), batch)
    return ADAM.update_fn(step, gradients, state), nats


def main(options: str) -> int:
    """Train with `options`, a JSON text, and return the exit status. On failure, print the reason in the last line."""
    try:
        train(msgspec.json.decode(options, type=Options))
    except Exception as error:
        print(error if isinstance(error, GrainSftError) else f"{type(error).__name__}: {error}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
