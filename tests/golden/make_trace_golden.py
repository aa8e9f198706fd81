"""Write `olmo_packed_steps.json` with the original OLMo-core: what the ranks of a run over packed rows are given, step by
step, through two epochs.

The corpora are cases of `tests/packed_corpora.py` whose documents all have lengths of their own, so that no sort has ties.
`NumpyFSLDataLoader` walks `NumpyPackedFSLDataset` as a trainer does: epoch after epoch, a loader a rank. The file holds, of
each step and rank, the instances in their order, and for every instance a digest of its tokens, label mask and documents.
Needed: ai2-olmo-core 3.0.0 (with torch, CPU build), numpy 2.4.6.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from make_packed_golden import digests_of, opened
from making import olmo_loader, options, versions, write_json

from packed_corpora import PACKED_CASES, PAD, PackedCase  # isort: skip

RUNS = (("distinct, groups", 8, 4, 34521), ("distinct, five files", 12, 3, 7), ("distinct, one longer", 6, 2, 34521))
"""Case, rows of a global batch, ranks and seed of each run."""
EPOCHS = 2


def steps_of(dataset: Any, batch: int, ranks: int, seed: int) -> list[list[list[int]]]:
    """Return [step][rank] -> instances, of all epochs one after the other."""
    assert PAD == 0  # as of the loader
    by_rank = []
    for rank in range(ranks):
        with tempfile.TemporaryDirectory() as temp:
            loader = olmo_loader(dataset, Path(temp), batch=batch, seed=seed, ranks=ranks, rank=rank)
            steps = []
            for epoch in range(1, EPOCHS + 1):
                loader.reshuffle(epoch=epoch)
                steps += [given["index"].tolist() for given in loader]
                loader.reset()
        by_rank.append(steps)
    return [list(ranks_of_step) for ranks_of_step in zip(*by_rank, strict=True)]


def run_of(case: PackedCase, batch: int, ranks: int, seed: int) -> dict[str, Any]:
    """Return what OLMo-core gives in one run."""
    with opened(case) as (dataset, corpus, places):
        found = {"case": case.name, "corpus": corpus, "batch": batch, "ranks": ranks, "seed": seed, "epochs": EPOCHS}
        rows = "".join(digests_of(dataset, places))
        return {**found, "rows": rows, "steps": steps_of(dataset, batch, ranks, seed)}


if __name__ == "__main__":
    out = options("olmo_packed_steps.json").out
    os.environ["OLMO_DATA_PREP_WORKERS"] = "1"
    cases = {case.name: case for case in PACKED_CASES}
    about = "steps: [step][rank] -> instances; rows: eight digits an instance, row_digest of packed_corpora.py"
    made: dict[str, Any] = {"made_by": versions("ai2-olmo-core", "numpy", "torch", "python"), "about": about}
    made["runs"] = [run_of(cases[name], *rest) for name, *rest in RUNS]
    write_json(out / "olmo_packed_steps.json", made, compact=["runs"])
