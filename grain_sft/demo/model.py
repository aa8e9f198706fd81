"""The demo's model: a decoder-only transformer of one block in plain JAX and float32, which reads grain_sft's batches."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
Batch = Mapping[str, Any]
"""Arrays [rows, L] as `ShiftTargets` returns them: `inputs`, `targets`, `inputs_position` and so on."""

HEADS = 4  # number of attention heads
HIDDEN = 4  # width of the MLP's hidden layer, as a multiple of the model's width
_ROPE_BASE = 10_000.0


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

    A token attends to itself and to earlier tokens of its own segment (`inputs_segmentation`). Rotary
    embeddings encode `inputs_position`.
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
    """Return the mean cross-entropy in nats of targets whose `targets_segmentation` is not 0, or 0 if there are none."""
    scores = logits(params, batch)
    target_scores = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(scores, axis=-1) - target_scores
    takes_loss = batch["targets_segmentation"] != 0
    return jnp.sum(jnp.where(takes_loss, nats, 0.0)) / jnp.maximum(takes_loss.sum(), 1)


def _normed(x: jax.Array) -> jax.Array:
    """Return x divided by the root mean square of its last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def _rotated(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Return x, float32 [rows, L, heads, width]: columns i and i + width/2 are rotated by the position times frequency i."""
    frequencies = _ROPE_BASE ** (-jnp.arange(0, x.shape[-1], 2, dtype=jnp.float32) / x.shape[-1])
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    first, second = jnp.split(x, 2, axis=-1)
    cosine, sine = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
