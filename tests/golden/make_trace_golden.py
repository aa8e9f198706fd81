"""Write `olmo_packed_steps.json` with the original OLMo-core: what the ranks of a run over packed rows are given, step by
step, through two epochs.

The corpus is a case of `tests/packed_corpora.py` whose documents all have lengths of their own, so that no sort has ties
and the values are the same on every CPU. `NumpyFSLDataLoader` walks `NumpyPackedFSLDataset` as a trainer does: epoch after
epoch, a loader a rank. The file holds, of each step and rank, the instances in their order, and for every instance a
digest of its tokens, label mask and documents. It holds no code of the original and is not needed to run the tests.

Needed: ai2-olmo-core 3.0.0 (which brings torch; the CPU build is enough). For example::

    pip install ai2-olmo-core==3.0.0 numpy==2.4.6
    python make_trace_golden.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from make_packed_golden import olmo_dataset, plan_places
from packed_corpora import PACKED_CASES, PAD, PackedCase, digest_of_files, row_digest, write_case

RUNS = (
    # (case, rows a global batch, ranks, seed)
    ("distinct, groups", 8, 4, 34521),
    ("distinct, five files", 12, 3, 7),
    ("distinct, one longer", 6, 2, 34521),
)
EPOCHS = 2


def steps_of(dataset: Any, folder: Path, batch: int, ranks: int, seed: int) -> list[list[list[int]]]:
    """[step][rank] -> instances, of all epochs one after the other."""
    from olmo_core.data import DataCollator, NumpyFSLDataLoader

    by_rank = []
    for rank in range(ranks):
        loader = NumpyFSLDataLoader(
            dataset,
            collator=DataCollator(pad_token_id=PAD),
            global_batch_size=batch * dataset.sequence_length,
            work_dir=str(folder / f"loader{rank}"),
            seed=seed,
            dp_world_size=ranks,
            dp_rank=rank,
            fs_local_rank=0,
        )
        steps = []
        for epoch in range(1, EPOCHS + 1):
            loader.reshuffle(epoch=epoch)
            steps += [given["index"].tolist() for given in loader]
            loader.reset()
        by_rank.append(steps)
    return [list(ranks_of_step) for ranks_of_step in zip(*by_rank, strict=True)]


def run_of(case: PackedCase, batch: int, ranks: int, seed: int) -> dict[str, Any]:
    """What OLMo-core gives in one run."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens, masks = write_case(case, folder)
        dataset = olmo_dataset(case, tokens, masks, folder / "work")
        sizes = [path.stat().st_size // np.dtype(case.dtype).itemsize for path in tokens]
        places = plan_places(dataset, case, sizes)
        rows = []
        for number, row in enumerate(places):
            item = dataset[number]
            rows.append(row_digest(item["input_ids"], item["label_mask"], item["doc_lens"], row))
        return {
            "case": case.name,
            "corpus": digest_of_files([*tokens, *masks]),
            "batch": batch,
            "ranks": ranks,
            "seed": seed,
            "epochs": EPOCHS,
            "rows": "".join(rows),
            "steps": steps_of(dataset, folder, batch, ranks, seed),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write olmo_packed_steps.json.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    os.environ["OLMO_DATA_PREP_WORKERS"] = "1"
    cases = {case.name: case for case in PACKED_CASES}
    runs = [run_of(cases[name], *rest) for name, *rest in RUNS]
    made_by = {name: importlib.metadata.version(name) for name in ("ai2-olmo-core", "numpy", "torch")}
    lines = ",\n".join(f"  {json.dumps(run, separators=(',', ':'))}" for run in runs)
    about = "steps: [step][rank] -> instances; rows: eight digits an instance, row_digest of packed_corpora.py"
    target = arguments.out / "olmo_packed_steps.json"
    target.write_text(
        f'{{\n "made_by": {json.dumps({**made_by, "python": platform.python_version()})},\n "about": {json.dumps(about)},\n'
        f' "runs": [\n{lines}\n ]\n}}\n',
        encoding="utf-8",
    )
    print(target.stat().st_size, "bytes", [len(run["steps"]) for run in runs], "steps")


if __name__ == "__main__":
    main()
