"""Figures of a packing, and of the cost of attention of its rows: the devices of a step wait for the one with the highest."""

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
_STEPS = 1000  # of random rows


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


def padding_share(num_tokens: float, num_positions: float) -> float:
    """Return the share of the positions of rows that hold padding."""
    return 1 - num_tokens / num_positions


def algorithm_title(figures: Mapping[str, Any]) -> str:
    """Return the algorithm of a `packing_report`, with the rows of a batch where its padding depends on them."""
    rows = figures.get("batch_rows")
    return str(figures["algorithm"]) if rows is None else f"{figures['algorithm']} x {rows:,}"


def compare_algorithms(
    corpus: Corpus, sequence_length: int, options: Mapping[str, Any], algorithms: Iterable[str] = tuple(ALGORITHMS)
) -> Iterator[dict[str, Any]]:
    """Yield the `packing_report` of one epoch of each of `algorithms`, whose plans are not kept, with the `seconds` to make,
    write and check the plan; or its `algorithm` and `error`, where one can't pack this corpus.

    Args:
      options: Arguments of `PackedLayout` but for its algorithm and epochs; `max_segments` goes to those that bound it.
    """
    for name in algorithms:
        taken = {**options, "epochs": 1}
        if not ALGORITHMS[name].bounds_segments:
            taken["max_segments"] = None
        with tempfile.TemporaryDirectory(prefix="grain_sft_pack_") as folder:
            begin = time.perf_counter()
            try:
                layout = PackedLayout(corpus, sequence_length, algorithm=name, cache_dir=folder, **taken)
            except LayoutError as error:
                yield {"algorithm": name, "error": str(error)}
                continue
            seconds = time.perf_counter() - begin
            figures = packing_report(layout) | {"seconds": seconds}
            del layout  # and its maps, before their files
        yield figures


def plan_files(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Return the fingerprint and path of the plan of each epoch in the cache `folder`; None for the usual cache."""
    finder, found = finder_of(layout.corpus, layout.packing), []
    for epoch in range(layout.epochs):
        depends = depends_of(finder, dataclasses.replace(layout.packing, epoch=epoch))
        path = str(artifact.place("plans", depends, folder))
        found.append({"fingerprint": artifact.fingerprint(depends), "path": path})
    return found


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Return `plan_files`: its former name."""
    warnings.warn("plan_places is now plan_files.", DeprecationWarning, stacklevel=2)
    return plan_files(layout, folder)
