"""Figures of a packing: padding, cut documents, and how evenly the cost of attention spreads over devices."""

from __future__ import annotations

import dataclasses
import tempfile
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
from grain_sft.storage import artifact

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

ROWS_A_DEVICE = (1, 2, 4)
"""Numbers of rows that a device computes in a step, for which a report has figures."""

_DEVICES = 64  # most devices that share a step
_STEPS = 1000  # most steps of random rows that are measured


def packing_report(layout: PackedLayout) -> dict[str, Any]:
    """Return figures of all epochs of a layout together, ready for JSON.

    `batch_rows` is None for an algorithm that does not pack whole batches. `split_documents` is the number of documents that
    are in several pieces. `attention` is an `attention_spread`.
    """
    counts, packing = layout.statistics, layout.packing
    segments = np.concatenate([np.diff(plan.ends, prepend=0) for plan in layout.plans])
    return {
        "algorithm": packing.algorithm,
        "sequence_length": layout.sequence_length,
        "epochs": layout.epochs,
        "batch_rows": packing.batch_rows if ALGORITHMS[packing.algorithm].whole_batches else None,
        "rows": counts["rows"],
        "tokens": counts["tokens"],
        "padding": counts["padding"],
        "padding_share": padding_share(counts["tokens"], counts["rows"] * layout.sequence_length),
        "documents": counts["documents"],
        "truncated_documents": counts["cut_documents"],
        "truncated_tokens": counts["cut_tokens"],
        "dropped_documents": counts["dropped_documents"],
        "dropped_tokens": counts["dropped_tokens"],
        "split_documents": layout.split_documents,
        "segments_a_row": {name: getattr(np, name)(segments).item() for name in ("mean", "median", "max")},
        "attention": attention_spread(layout.row_costs(), layout.longest_costs),
    }


def over_devices(costs: Int64[np.ndarray, "steps rows"], rows_a_device: int) -> Float64[np.ndarray, " steps"]:
    """Return the highest cost of a device divided by the mean cost of a device, for each step. A device computes
    `rows_a_device` consecutive rows, and its cost is their sum. 1.0 means that no device waits for another."""
    devices = costs.reshape(len(costs), -1, rows_a_device).sum(axis=2)
    spread: Float64[np.ndarray, " steps"] = devices.max(axis=1) / np.maximum(devices.mean(axis=1), 1e-9)
    return spread


def attention_spread(costs: Int64[np.ndarray, " rows"], longest: Int64[np.ndarray, " rows"]) -> list[dict[str, Any]]:
    """Return how evenly the cost of a step spreads over its devices, at most 64, for 1, 2 and 4 rows a device.

    A layout of fewer than 4 rows has fewer figures: a step needs 1, 2 or 4 rows.

    Args:
      costs: Cost of each row.
      longest: Cost of the longest segment of each row.

    Returns:
      Dicts of `rows_a_device`, `devices`, and three figures. A figure is the highest cost of a device divided by the mean cost
      of a device, averaged over steps:

      - shuffled: `over_devices` of steps of random rows.
      - balanced: `over_devices` of steps whose rows cost about the same.
      - floor: Lower bound of `shuffled`, however the rows of each step are distributed: one device has at least the cost of
        the longest segment.
    """
    rng = np.random.default_rng(0)
    figures = []
    devices = min(_DEVICES, max(1, len(costs) // ROWS_A_DEVICE[-1]))
    for rows_a_device in [rows for rows in ROWS_A_DEVICE if rows * devices <= len(costs)]:
        batch_rows = rows_a_device * devices
        in_whole_steps = len(costs) // batch_rows * batch_rows
        rows = rng.permutation(len(costs))[:in_whole_steps]
        by_cost = rows[np.argsort(costs[rows], kind="stable")]
        balanced = rng.permuted(by_cost.reshape(-1, batch_rows), axis=1)
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


def padding_share(num_tokens: float, num_positions: float) -> float:
    """Return the share of positions that are padding."""
    return 1 - num_tokens / num_positions


def algorithm_title(figures: Mapping[str, Any]) -> str:
    """Return the algorithm of a `packing_report`, with the rows of a batch if it packs whole batches."""
    rows = figures.get("batch_rows")
    return str(figures["algorithm"]) if rows is None else f"{figures['algorithm']} x {rows:,}"


def compare_algorithms(corpus: Corpus, sequence_length: int, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the `packing_report` of one epoch for each algorithm of the table. Plans are not kept.

    A report also has the `seconds` that it took to make, write and check the plan. An algorithm that can't pack this corpus
    has a dict of `algorithm` and `error` instead.

    Args:
      corpus: Corpus whose documents are packed.
      sequence_length: Number of tokens in a row.
      options: Arguments of `PackedLayout` other than algorithm, epochs and cache_dir. Only algorithms that bound segments get
        `max_segments`.
    """
    for name in ALGORITHMS:
        arguments = {**options, "epochs": 1}
        if not ALGORITHMS[name].bounds_segments:
            arguments["max_segments"] = None
        with tempfile.TemporaryDirectory(prefix="grain_sft_pack_") as folder:
            begin = time.perf_counter()
            try:
                layout = PackedLayout(corpus, sequence_length, algorithm=name, cache_dir=folder, **arguments)
            except LayoutError as error:
                yield {"algorithm": name, "error": str(error)}
                continue
            seconds = time.perf_counter() - begin
            figures = packing_report(layout) | {"seconds": seconds}
            del layout  # which closes the plan's maps before the folder is deleted
        yield figures


def plan_files(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Return the fingerprint and the path of the plan of each epoch, in the cache `folder`; None means the layout's own."""
    plans = []
    for epoch in range(layout.epochs):
        dependencies = depends_of(layout.finder, dataclasses.replace(layout.packing, epoch=epoch))
        path = str(artifact.place("plans", dependencies, folder or layout.plan_folder))
        plans.append({"fingerprint": artifact.fingerprint(dependencies), "path": path})
    return plans


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Former name of `plan_files`."""
    warnings.warn("plan_places is now plan_files.", DeprecationWarning, stacklevel=2)
    return plan_files(layout, folder)
