"""What packing made of a corpus, in figures."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.corpus import Corpus
from grain_sft.errors import LayoutError
from grain_sft.layout.packed import PackedLayout
from grain_sft.layout.packing import ALGORITHMS
from grain_sft.layout.plan import depends_of, finder_of
from grain_sft.storage import artifact


def packing_report(layout: PackedLayout) -> dict[str, Any]:
    """Figures of all epochs of a layout together, ready for JSON.

    Returns:
      algorithm, epochs, sequence_length; batch_rows, of multipack, else None; rows; tokens held;
      padding (tokens) and padding_share; documents;
      truncated_documents and truncated_tokens; dropped_documents and dropped_tokens; split_documents, of which rows hold
      several pieces; segments_a_row: mean, median and max.
    """
    found = layout.statistics
    segments = np.concatenate([np.diff(plan.ends, prepend=0) for plan in layout.plans])
    return {
        "algorithm": layout.packing.algorithm,
        "sequence_length": layout.sequence_length,
        "epochs": layout.epochs,
        "batch_rows": layout.packing.batch_rows if ALGORITHMS[layout.packing.algorithm].whole_batches else None,
        "rows": found["rows"],
        "tokens": found["tokens"],
        "padding": found["padding"],
        "padding_share": padding_share(found["tokens"], found["rows"] * layout.sequence_length),
        "documents": found["documents"],
        "truncated_documents": found["cut_documents"],
        "truncated_tokens": found["cut_tokens"],
        "dropped_documents": found["dropped_documents"],
        "dropped_tokens": found["dropped_tokens"],
        "split_documents": layout.split_documents,
        "segments_a_row": {
            "mean": float(segments.mean()),
            "median": float(np.median(segments)),
            "max": int(segments.max()),
        },
    }


def padding_share(num_tokens: float, num_positions: float) -> float:
    """Return the share of the positions of rows that hold padding: of whole epochs here, of some batches in `bench`."""
    return 1 - num_tokens / num_positions


def algorithm_title(figures: Mapping[str, Any]) -> str:
    """Return the algorithm of a `packing_report` with what its padding depends on beside the corpus."""
    rows = figures.get("batch_rows")
    return str(figures["algorithm"]) if rows is None else f"{figures['algorithm']} x {rows:,}"


def compare_algorithms(
    corpus: Corpus, sequence_length: int, options: Mapping[str, Any], algorithms: Iterable[str] = tuple(ALGORITHMS)
) -> Iterator[dict[str, Any]]:
    """`packing_report` of one epoch of each of `algorithms`, whose plans are not kept, one after the other.

    Args:
      options: of `PackedLayout`, but for its algorithm and epochs; `max_segments` goes to those that know it.

    Returns:
      Also `seconds`, to make, write and check the plan; or `algorithm` and `error`, where one can't pack this corpus.
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


def plan_places(layout: PackedLayout, folder: str | Path | None = None) -> list[dict[str, str]]:
    """Fingerprint and path of the plan of each epoch, kept in the cache `folder`; None: where plans are kept."""
    documents = finder_of(layout.corpus, layout.packing)
    each_epoch = (dataclasses.replace(layout.packing, epoch=epoch) for epoch in range(layout.epochs))
    depends = [depends_of(layout.corpus, options, documents) for options in each_epoch]
    return [
        {"fingerprint": artifact.fingerprint(each), "path": str(artifact.place("plans", each, folder))}
        for each in depends
    ]
