"""Figures of a packed layout: padding, cut documents, and how evenly the cost of attention spreads over devices."""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of
from grain_sft.storage import artifact, temporary_folder

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

ROWS_A_DEVICE = (1, 2, 4)
"""A report has figures for devices that compute 1, 2 or 4 rows in a step."""

_DEVICES = 64  # maximum number of devices that share a step
_STEPS = 1000  # maximum number of steps of random rows that are measured


def packing_report(layout: PackedLayout) -> dict[str, Any]:
    """Return the figures of a layout, all its epochs together, as a dict for JSON.

    `batch_rows` is None for an algorithm that does not pack whole batches.
    """
    counts, packing = layout.statistics, layout.packing
    # for each row, the number of its segments, and the number of tokens of the longest segment
    segments = np.concatenate([np.diff(plan.ends, prepend=0) for plan in layout.plans])
    longest = [np.maximum.reduceat(plan.length, np.append(0, plan.ends[:-1])) for plan in layout.plans]
    return {
        "algorithm": packing.algorithm,
        "sequence_length": layout.sequence_length,
        "epochs": layout.epochs,
        "batch_rows": packing.batch_rows if ALGORITHMS[packing.algorithm].whole_batches else None,
        **{name: counts[name] for name in ("rows", "tokens", "padding")},
        "padding_share": 1 - counts["tokens"] / (counts["rows"] * layout.sequence_length),
        "documents": counts["documents"],
        "truncated_documents": counts["cut_documents"],
        "truncated_tokens": counts["cut_tokens"],
        "dropped_documents": counts["dropped_documents"],
        "dropped_tokens": counts["dropped_tokens"],
        "split_documents": layout.split_documents,
        "segments_a_row": {name: getattr(np, name)(segments).item() for name in ("mean", "median", "max")},
        "attention": attention_spread(layout.row_costs(), np.square(np.concatenate(longest).astype(np.int64))),
    }


def over_devices(costs: Int64[np.ndarray, "steps rows"], rows_a_device: int) -> Float64[np.ndarray, " steps"]:
    """Return, for each step, the highest cost of a device divided by the mean cost of the devices.

    A device has `rows_a_device` consecutive rows. A result of 1.0 means that no device waits.
    """
    devices = costs.reshape(len(costs), -1, rows_a_device).sum(axis=2)
    spread: Float64[np.ndarray, " steps"] = devices.max(axis=1) / np.maximum(devices.mean(axis=1), 1e-9)
    return spread


def attention_spread(costs: Int64[np.ndarray, " rows"], longest: Int64[np.ndarray, " rows"]) -> list[dict[str, Any]]:
    """Return figures that show how evenly the attention cost of a step spreads over at most 64 devices.

    Args:
      costs: Cost of each row.
      longest: Cost of the longest segment of each row.

    Returns:
      One dict for each of `ROWS_A_DEVICE`, if the layout has enough rows for a step. A dict has `rows_a_device`, `devices`, and
      three means over steps:

      - shuffled: `over_devices` of steps of random rows.
      - balanced: `over_devices` of steps whose rows cost about the same.
      - floor: Lower bound of `shuffled`, because one device has the step's longest segment: the cost of this segment divided by
        the mean cost of the devices, or 1 if that is greater.
    """
    rng = np.random.default_rng(0)
    figures = []
    # a small layout has fewer devices, so that one step with the most rows a device has enough rows
    devices = min(_DEVICES, max(1, len(costs) // ROWS_A_DEVICE[-1]))
    for rows_a_device in [rows for rows in ROWS_A_DEVICE if rows * devices <= len(costs)]:
        batch_rows = rows_a_device * devices
        rows = rng.permutation(len(costs))[: len(costs) // batch_rows * batch_rows]  # of whole steps
        by_cost = rows[np.argsort(costs[rows], kind="stable")]
        balanced = rng.permuted(by_cost.reshape(-1, batch_rows), axis=1)  # within a step, devices get random rows
        shuffled = rows.reshape(-1, batch_rows)[:_STEPS]
        mean_of_device = costs[shuffled].mean(axis=1) * rows_a_device
        floor = longest[shuffled].max(axis=1) / np.maximum(mean_of_device, 1e-9)
        spreads = {
            "shuffled": over_devices(costs[shuffled], rows_a_device),
            "floor": np.maximum(floor, 1),
            "balanced": over_devices(costs[balanced], rows_a_device),
        }
        means = {name: float(spread.mean()) for name, spread in spreads.items()}
        figures.append({"rows_a_device": rows_a_device, "devices": devices, **means})
    return figures


def algorithm_title(figures: Mapping[str, Any]) -> str:
    """Return the title of a `packing_report`: the algorithm's name, or "multipack x 8" if multipack packs batches of 8 rows."""
    rows = figures.get("batch_rows")
    return str(figures["algorithm"]) if rows is None else f"{figures['algorithm']} x {rows:,}"


def compare_algorithms(corpus: Corpus, sequence_length: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the `packing_report` of one epoch for each algorithm in `ALGORITHMS`, and for `options["algorithm"]`.

    Each report also has `seconds`, the time to make, write and check the plan. If an algorithm can't pack this corpus, its
    report has only `algorithm` and `error`.

    Args:
      corpus, sequence_length, options: Arguments of `PackedLayout`, without epochs and cache_dir. `max_segments` applies only
        to the algorithms that can limit the segments of a row. `algorithm` may be missing, None or `package.module:Name`.
    """
    for name in filter(None, dict.fromkeys((*ALGORITHMS, options.get("algorithm")))):
        arguments = {**options, "algorithm": name, "epochs": 1}
        if not ALGORITHMS[name].bounds_segments:
            arguments["max_segments"] = None
        with temporary_folder("grain_sft_pack_") as folder:
            begin = time.perf_counter()
            try:
                layout = PackedLayout(corpus, sequence_length, cache_dir=folder, **arguments)
            except LayoutError as error:
                yield {"algorithm": name, "error": str(error)}
                continue
            seconds = time.perf_counter() - begin
            figures = packing_report(layout) | {"seconds": seconds}
            del layout  # closes the memory maps of the plan before the folder is deleted
        yield figures


def plan_files(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Return the fingerprint and the path of each epoch's plan in `folder`. None means `layout.plan_folder`."""
    plans = []
    for epoch in range(layout.epochs):
        dependencies = depends_of(layout.finder, dataclasses.replace(layout.packing, epoch=epoch))
        path = str(artifact.place("plans", dependencies, folder or layout.plan_folder))
        plans.append({"fingerprint": f"sha256:{artifact.hash_of(dependencies)}", "path": path})
    return plans


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Former name of `plan_files`."""
    warnings.warn("plan_places is now plan_files.", DeprecationWarning, stacklevel=2)
    return plan_files(layout, folder)
