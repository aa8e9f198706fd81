"""Spread of the cost of attention over the devices of a step, which all wait for the one with the highest cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

ROWS_A_DEVICE = (1, 2, 4)

_DEVICES = 64
_STEPS = 1000  # of random rows


def over_devices(costs: Int64[np.ndarray, "steps rows"], rows_a_device: int) -> Float64[np.ndarray, " steps"]:
    """Return the highest cost of a device divided by the mean of all devices, for each step. Devices have consecutive rows."""
    devices = costs.reshape(len(costs), -1, rows_a_device).sum(axis=2)
    spread: Float64[np.ndarray, " steps"] = devices.max(axis=1) / np.maximum(devices.mean(axis=1), 1e-9)
    return spread


def attention_spread(costs: Int64[np.ndarray, " rows"], longest: Int64[np.ndarray, " rows"]) -> list[dict[str, Any]]:
    """Return means of `over_devices` for each of `ROWS_A_DEVICE`, in steps of up to 64 devices.

    Args:
      costs: Cost of each row.
      longest: Cost of the longest segment of each row.

    Returns:
      Dicts of `rows_a_device`, `devices`, and three means: `shuffled`, of steps of random rows; `floor`, of these if only the
      longest segment of a step kept devices from equal costs; and `balanced`, of rows that are sorted by cost.
    """
    random, found = np.random.default_rng(0), []
    devices = min(_DEVICES, max(1, len(costs) // ROWS_A_DEVICE[-1]))
    for each in [rows for rows in ROWS_A_DEVICE if rows * devices <= len(costs)]:
        whole = len(costs) // (each * devices) * each * devices
        rows = random.permutation(len(costs))[:whole]
        by_cost = random.permuted(rows[np.argsort(costs[rows], kind="stable")].reshape(-1, each * devices), axis=1)
        steps = rows.reshape(by_cost.shape)[:_STEPS]
        floor = longest[steps].max(axis=1) / np.maximum(costs[steps].mean(axis=1) * each, 1e-9)
        spreads = {"shuffled": over_devices(costs[steps], each), "floor": np.maximum(floor, 1)}
        spreads["balanced"] = over_devices(costs[by_cost], each)
        means = {name: float(spread.mean()) for name, spread in spreads.items()}
        found.append({"rows_a_device": each, "devices": devices, **means})
    return found
