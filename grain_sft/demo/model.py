"""Small decoder-only transformer in plain JAX and float32. Its inputs are grain_sft's batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, jax.Array]
Batch = Mapping[str, Any]
"""Arrays [rows, L], as `ShiftTargets` makes them."""

_ROPE_BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model."""

    vocab_size: int  # rows of the embedding, which is also the output matrix
    width: int = 128  # width of the residual stream
    heads: int = 4  # attention heads; `width // heads` has to be even
    layers: int = 2  # blocks of attention and an MLP
    hidden: int = 512  # width of the hidden layer of each MLP


def init_params(config: ModelConfig, seed: int) -> Params:
    """Return float32 parameters: `embedding` [vocab, width], `final_norm` [width], the rest [layers, ...]."""
    shapes = {
        "embedding": (config.vocab_size, config.width),
        "attention_in": (config.layers, config.width, 3 * config.width),
        "attention_out": (config.layers, config.width, config.width),
        "mlp_in": (config.layers, config.width, config.hidden),
        "mlp_out": (config.layers, config.hidden, config.width),
    }
    residual_scale = 1 / math.sqrt(2 * config.layers)  # each block adds twice to the residual stream
    generator = np.random.Generator(np.random.PCG64(seed))
    params = {}
    for name, shape in shapes.items():
        fan_in = shape[-2] if name != "embedding" else config.width
        scale = (residual_scale if name.endswith("_out") else 1.0) / math.sqrt(fan_in)
        params[name] = jnp.asarray(generator.standard_normal(shape, np.float32) * np.float32(scale))
    norm = jnp.ones((config.layers, config.width), jnp.float32)
    return {**params, "attention_norm": norm, "mlp_norm": norm, "final_norm": jnp.ones(config.width, jnp.float32)}


def logits(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """Return float32 [rows, L, vocab], logits of the next token.

    A token attends to itself and to earlier tokens of its own segment (`inputs_segmentation`). Rotary
    embeddings encode `inputs_position`.
    """
    segments = batch["inputs_segmentation"]
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), jnp.bool_))
    mask = causal & (segments[:, :, None] == segments[:, None, :])  # [rows, L, L]
    rotation = _rotation(batch["inputs_position"], config.width // config.heads)

    def block(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        x = x + _attention(_norm(x, layer["attention_norm"]), layer, config.heads, mask, rotation)
        hidden = jax.nn.gelu(_norm(x, layer["mlp_norm"]) @ layer["mlp_in"])
        return x + hidden @ layer["mlp_out"], None

    layers = {name: value for name, value in params.items() if name not in ("embedding", "final_norm")}
    x, _ = jax.lax.scan(block, params["embedding"][batch["inputs"]], layers, unroll=True)
    return _norm(x, params["final_norm"]) @ params["embedding"].T


def loss(params: Params, config: ModelConfig, batch: Batch) -> jax.Array:
    """Return the mean cross-entropy in nats of targets whose `targets_segmentation` is not 0, or 0 if there are none."""
    scores = logits(params, config, batch)
    target_scores = jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(scores, axis=-1) - target_scores
    takes_loss = batch["targets_segmentation"] != 0
    return jnp.sum(jnp.where(takes_loss, nats, 0.0)) / jnp.maximum(takes_loss.sum(), 1)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def _attention(
    x: jax.Array, layer: Params, heads: int, mask: jax.Array, rotation: tuple[jax.Array, jax.Array]
) -> jax.Array:
    rows, length, width = x.shape
    mixed = (x @ layer["attention_in"]).reshape(rows, length, 3, heads, width // heads)
    query, key, value = _rotate(mixed[:, :, 0], rotation), _rotate(mixed[:, :, 1], rotation), mixed[:, :, 2]
    attended = jax.nn.dot_product_attention(query, key, value, mask=mask[:, None])
    return attended.reshape(rows, length, width) @ layer["attention_out"]


def _rotation(positions: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Return the cosine and sine of the rotary angles, each float32 [rows, L, 1, width // 2]."""
    frequencies = _ROPE_BASE ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    angles = positions[:, :, None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def _rotate(x: jax.Array, rotation: tuple[jax.Array, jax.Array]) -> jax.Array:
    cosine, sine = rotation
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cosine - second * sine, first * sine + second * cosine], axis=-1)
