"""Figures of a packing."""

import dataclasses
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.costs import attention_spread
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of, finder_of
from grain_sft.storage import artifact


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
        depends = depends_of(layout.corpus, dataclasses.replace(layout.packing, epoch=epoch), finder)
        path = str(artifact.place("plans", depends, folder))
        found.append({"fingerprint": artifact.fingerprint(depends), "path": path})
    return found


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Return `plan_files`: its former name."""
    warnings.warn("plan_places is now plan_files.", DeprecationWarning, stacklevel=2)
    return plan_files(layout, folder)
