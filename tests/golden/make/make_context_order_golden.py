"""Write `context_order.json` with MaxText: the columns of rows in its load-balanced order, by length and number of shards.

Needed: maxtext 0.2.5 (Python 3.12).
"""

import numpy as np
from making import options, versions, write_json
from maxtext.common.common_types import ReorderStrategy
from maxtext.utils.max_utils import reorder_causal_load_balanced

SHAPES = ((2, 4), (2, 64), (4, 24), (4, 64), (6, 36), (8, 64), (16, 32), (32, 192))


def order_of(shards: int, length: int) -> list[int]:
    """Return for each column of MaxText's batch which column of the row it was. All rows have the same order."""
    batch = {"inputs": np.tile(np.arange(length, dtype=np.int32), (3, 1))}
    rows = np.asarray(reorder_causal_load_balanced(batch, shards, ReorderStrategy.DUAL_CHUNK_SWAP, "tpu")["inputs"])
    assert (rows == rows[0]).all()
    return rows[0].tolist()


if __name__ == "__main__":
    out = options("context_order.json").out
    runs = {f"{shards} x {length}": order_of(shards, length) for shards, length in SHAPES}
    write_json(out / "context_order.json", {"versions": versions("maxtext", "jax", "python"), "runs": runs})
