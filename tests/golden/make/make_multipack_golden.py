"""Write `multipack_batches.json` and `openchat_order.json` with OpenChat's own sampler.

The first file has the batches of the corpora of `tests/helpers/packed_corpora.py`: the lengths of each row's documents, and the
documents themselves only where all lengths differ, since the sampler's sort is not stable. The second has the order in which
the sampler takes documents that fill a row each.

Needed: numpy 2.4.6, numba 0.68.1, and OpenChat's `multipack_sampler.py`, from its repository (imoneoi/openchat) or its wheel::

    pip download --no-deps ochat==3.6.1
    python -m zipfile -e ochat-3.6.1-py3-none-any.whl ochat-wheel
    python make_multipack_golden.py ochat-wheel/ochat/training_deepspeed/multipack_sampler.py
"""

import hashlib
from typing import Any

import numpy as np
from making import import_file, options, versions, write_json

from packed_corpora import MULTIPACK_CASES, MultipackCase, multipack_lengths, rows_digest  # isort: skip


def batches_of(sampler: Any, case: MultipackCase, lengths: Any, epoch: int) -> list[list[list[int]]]:
    """Return a list [batch][rank] of lists of documents, in the order in which the original gives them to a rank."""
    by_rank = []
    for rank in range(case.ranks):
        made = sampler(lengths, np.ones(len(lengths), np.float32), case.capacity, case.ranks, rank, case.seed)
        by_rank.append([batch.tolist() for batch, _, _ in made.iter(epoch)])
    return [list(rows) for rows in zip(*by_rank, strict=True)]


def case_of(sampler: Any, case: MultipackCase) -> dict[str, Any]:
    lengths, epochs = multipack_lengths(case), []
    for epoch in range(case.epochs):
        batches = batches_of(sampler, case, lengths, epoch)
        sizes = [[sorted(lengths[row].tolist()) for row in batch] for batch in batches]
        found: dict[str, Any] = {"batches": len(batches), "lengths": rows_digest(sizes)}
        if case.lengths.startswith("distinct"):
            found["documents"] = rows_digest(batches)
        found["first"] = (batches if "documents" in found else sizes)[0][:2] if batches else []
        epochs.append(found)
    return {"corpus": hashlib.sha256(lengths.astype("<i8").tobytes()).hexdigest()[:16], "epochs": epochs}


def order_of(sampler: Any, documents: int, seed: int) -> dict[str, Any]:
    """Return, for each of three epochs, the first ten documents of its order and a digest of the whole order as int64."""
    made = sampler(np.full(documents, 64), np.ones(documents, np.float32), 64, 1, 0, seed)
    epochs = []
    for epoch in range(3):
        order = np.concatenate([batch for batch, _, _ in made.iter(epoch)])
        digest = hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()
        epochs.append({"first": order[:10].tolist(), "sha256": digest})
    return {"documents": documents, "seed": seed, "epochs": epochs}


if __name__ == "__main__":
    given = options("multipack_batches.json and openchat_order.json", "sampler")
    sampler = import_file(given.sampler).MultipackDistributedSampler
    made_by = versions("numpy", "numba")
    made_by["multipack_sampler.py sha256"] = hashlib.sha256(given.sampler.read_bytes()).hexdigest()
    cases = {case.name: case_of(sampler, case) for case in MULTIPACK_CASES}
    write_json(given.out / "multipack_batches.json", {"made_by": made_by, "cases": cases})
    orders = [order_of(sampler, *case) for case in ((10, 0), (504, 42), (3000, 1337))]
    write_json(given.out / "openchat_order.json", {"made_by": made_by, "cases": orders})
