"""Figures of a packing: padding, cut documents, and how evenly the cost of attention spreads over devices."""

from __future__ import annotations

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of, finder_of
from grain_sft.storage import artifact

if TYPE_CHECKING:
    from jaxtyping import Float64, Int64

ROWS_A_DEVICE = (1, 2, 4)

_DEVICES = 64
_STEPS = 1000  # most steps of random rows that are measured


def packing_report(layout: PackedLayout) -> dict[str, Any]:
    """Return figures of all epochs of a layout together, ready for JSON. `batch_rows` is None for an algorithm that does not
    pack whole batches; `split_documents` are those that rows hold in several pieces; `attention` is an `attention_spread`."""
    found, packing = layout.statistics, layout.packing
    segments = np.concatenate([np.diff(plan.ends, prepend=0) for plan in layout.plans])
    return {
        "algorithm": packing.algorithm,
        "sequence_length": layout.sequence_length,
        "epochs": layout.epochs,
        "batch_rows": packing.batch_rows if ALGORITHMS[packing.algorithm].whole_batches else None,
        **{name: found[name] for name in ("rows", "tokens", "padding")},
        "padding_share": padding_share(found["tokens"], found["rows"] * layout.sequence_length),
        "documents": found["documents"],
        "truncated_documents": found["cut_documents"],
        "truncated_tokens": found["cut_tokens"],
        **{name: found[name] for name in ("dropped_documents", "dropped_tokens")},
        "split_documents": layout.split_documents,
        "segments_a_row": {name: getattr(np, name)(segments).item() for name in ("mean", "median", "max")},
        "attention": attention_spread(layout.row_costs(), layout.longest_costs),
    }


def over_devices(costs: Int64[np.ndarray, "steps rows"], rows_a_device: int) -> Float64[np.ndarray, " steps"]:
    """Return the highest cost of a device divided by the mean of all devices, for each step. Devices have consecutive rows."""
    devices = costs.reshape(len(costs), -1, rows_a_device).sum(axis=2)
    spread: Float64[np.ndarray, " steps"] = devices.max(axis=1) / np.maximum(devices.mean(axis=1), 1e-9)
    return spread


def attention_spread(costs: Int64[np.ndarray, " rows"], longest: Int64[np.ndarray, " rows"]) -> list[dict[str, Any]]:
    """Return how evenly cost spreads over the devices of a step, for each of `ROWS_A_DEVICE`, in steps of up to 64 devices.

    Args:
      costs: Cost of each row.
      longest: Cost of the longest segment of each row.

    Returns:
      Dicts of `rows_a_device`, `devices`, and means over steps: `shuffled`, `over_devices` of random rows; `balanced`, that of
      rows of similar cost; and `floor`, the lower bound for random rows: the longest segment's cost divided by the mean of
      all devices, at least 1.
    """
    rng, found = np.random.default_rng(0), []
    devices = min(_DEVICES, max(1, len(costs) // ROWS_A_DEVICE[-1]))
    for rows_a_device in [rows for rows in ROWS_A_DEVICE if rows * devices <= len(costs)]:
        batch_rows = rows_a_device * devices
        whole = len(costs) // batch_rows * batch_rows
        rows = rng.permutation(len(costs))[:whole]
        by_cost = rng.permuted(rows[np.argsort(costs[rows], kind="stable")].reshape(-1, batch_rows), axis=1)
        steps = rows.reshape(by_cost.shape)[:_STEPS]
        floor = longest[steps].max(axis=1) / np.maximum(costs[steps].mean(axis=1) * rows_a_device, 1e-9)
        spreads = {"shuffled": over_devices(costs[steps], rows_a_device), "floor": np.maximum(floor, 1)}
        spreads["balanced"] = over_devices(costs[by_cost], rows_a_device)
        means = {name: float(spread.mean()) for name, spread in spreads.items()}
        found.append({"rows_a_device": rows_a_device, "devices": devices, **means})
    return found


def padding_share(num_tokens: float, num_positions: float) -> float:
    """Return the share of positions that are padding."""
    return 1 - num_tokens / num_positions


def algorithm_title(figures: Mapping[str, Any]) -> str:
    """Return the algorithm of a `packing_report`, with the rows of a batch if it packs whole batches."""
    rows = figures.get("batch_rows")
    return str(figures["algorithm"]) if rows is None else f"{figures['algorithm']} x {rows:,}"


def compare_algorithms(
    corpus: Corpus, sequence_length: int, options: Mapping[str, Any], algorithms: Iterable[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Yield the `packing_report` of one epoch packed by each algorithm, with the `seconds` to make, write and check its plan;
    or its `algorithm` and `error`, if it can't pack this corpus. Plans are not kept.

    Args:
      corpus: Corpus whose documents are packed.
      sequence_length: Number of tokens in a row.
      options: Arguments of `PackedLayout` other than its algorithm and epochs. Only algorithms that bound segments get
        `max_segments`.
      algorithms: Names of the algorithms; None means all of the table.
    """
    for name in ALGORITHMS if algorithms is None else algorithms:
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
    """Return the fingerprint and path of the plan of each epoch in the cache `folder`; None for the usual cache."""
    finder, found = finder_of(layout.corpus, layout.packing), []
    for epoch in range(layout.epochs):
        dependencies = depends_of(finder, dataclasses.replace(layout.packing, epoch=epoch))
        path = str(artifact.place("plans", dependencies, folder))
        found.append({"fingerprint": artifact.fingerprint(dependencies), "path": path})
    return found


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Former name of `plan_files`."""
    warnings.warn("plan_places is now plan_files.", DeprecationWarning, stacklevel=2)
    return plan_files(layout, folder)
