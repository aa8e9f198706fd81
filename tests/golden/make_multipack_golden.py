"""Write `multipack_batches.json` and `openchat_order.json` with OpenChat's own sampler: its batches of documents of given
lengths, and the order in which it takes documents (its batches of one document that fills a row).

The lengths are made from seeds by `tests/packed_corpora.py`, which the tests share; the file holds digests and some
batches in full. It holds no code of the original and is not needed to run the tests.

Needed: numpy, numba, and OpenChat's `multipack_sampler.py`, from its repository (imoneoi/openchat,
ochat/training_deepspeed/) or its wheel, which need not be installed. For example::

    pip install numpy==2.4.6 numba==0.68.1
    pip download --no-deps ochat==3.6.1
    python -m zipfile -e ochat-3.6.1-py3-none-any.whl ochat-wheel
    python make_multipack_golden.py ochat-wheel/ochat/training_deepspeed/multipack_sampler.py

Its sort is not stable: which of several documents of one length goes where depends on numba. So there are the lengths
that each row holds, and only where all lengths differ the documents themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from packed_corpora import MULTIPACK_CASES, MultipackCase, multipack_lengths, rows_digest


def import_sampler(path: Path) -> Any:
    """The class of the original, from its file."""
    spec = importlib.util.spec_from_file_location("multipack_sampler", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MultipackDistributedSampler


def batches_of(sampler: Any, case: MultipackCase, lengths: Any, epoch: int) -> list[list[list[int]]]:
    """[batch][rank] -> documents, in the order in which the original gives them to a rank."""
    by_rank = []
    for rank in range(case.ranks):
        numseqs = np.ones(len(lengths), np.float32)
        made = sampler(lengths, numseqs, case.capacity, case.ranks, rank, case.seed)
        by_rank.append([batch.tolist() for batch, _, _ in made.iter(epoch)])
    return [list(rows) for rows in zip(*by_rank, strict=True)]


def order_of(sampler: Any, documents: int, seed: int) -> dict[str, Any]:
    """The order of documents in three epochs: first ten, and the digest of all as int64."""
    lengths = np.full(documents, 64)
    made = sampler(lengths, np.ones(documents, np.float32), 64, 1, 0, seed)
    epochs = []
    for epoch in range(3):
        order = np.concatenate([batch for batch, _, _ in made.iter(epoch)])
        digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
        epochs.append({"first": order[:10].tolist(), "sha256": digest})
    return {"documents": documents, "seed": seed, "epochs": epochs}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write multipack_batches.json and openchat_order.json.")
    parser.add_argument("sampler", type=Path, help="OpenChat's multipack_sampler.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    sampler = import_sampler(arguments.sampler)
    lines = []
    for case in MULTIPACK_CASES:
        lengths = multipack_lengths(case)
        epochs = []
        for epoch in range(case.epochs):
            batches = batches_of(sampler, case, lengths, epoch)
            sizes = [[sorted(lengths[row].tolist()) for row in batch] for batch in batches]
            found: dict[str, Any] = {"batches": len(batches), "lengths": rows_digest(sizes)}
            if case.lengths.startswith("distinct"):
                found["documents"] = rows_digest(batches)
            found["first"] = (batches if "documents" in found else sizes)[0][:2] if batches else []
            epochs.append(found)
        digest = hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16]
        lines.append(f"  {json.dumps(case.name)}: " + json.dumps({"corpus": digest, "epochs": epochs}))
        print(case.name, [epoch["batches"] for epoch in epochs])
    made_by = {name: importlib.metadata.version(name) for name in ("numpy", "numba")}
    made_by["multipack_sampler.py sha256"] = hashlib.sha256(arguments.sampler.read_bytes()).hexdigest()
    joined = ",\n".join(lines)
    text = f'{{\n "made_by": {json.dumps(made_by)},\n "cases": {{\n{joined}\n }}\n}}\n'
    (arguments.out / "multipack_batches.json").write_text(text, encoding="utf-8")
    orders = ",\n".join(f"  {json.dumps(order_of(sampler, *case))}" for case in ((10, 0), (504, 42), (3000, 1337)))
    text = f'{{\n "made_by": {json.dumps(made_by)},\n "cases": [\n{orders}\n ]\n}}\n'
    (arguments.out / "openchat_order.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
