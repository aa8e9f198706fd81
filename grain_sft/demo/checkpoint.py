"""Checkpoints: parameters and optimizer moments, and in the name the number of steps done. No data state at all."""

from __future__ import annotations

import dataclasses
import io
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from grain_sft.demo.folder import writing
from grain_sft.demo.model import ModelConfig, Params, init_params
from grain_sft.errors import StorageError
from grain_sft.storage import atomic_write


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
