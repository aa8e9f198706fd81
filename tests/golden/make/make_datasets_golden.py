"""Write `datasets_shuffle.json`: what `datasets.Dataset.shuffle(seed=...)` gives. Needed: datasets 5.2.0, numpy."""

import hashlib
import json

import datasets
import numpy as np
from making import options, versions

SIZES = (1, 2, 10, 57, 1000, 200003)
SEEDS = (0, 42, 34521)


def shuffled(size: int, seed: int) -> dict[str, object]:
    rows = list(datasets.Dataset.from_dict({"i": list(range(size))}).shuffle(seed=seed)["i"])
    return {"first": rows[:10], "sha256": hashlib.sha256(np.array(rows, "<i8").tobytes()).hexdigest()}


if __name__ == "__main__":
    out = options("datasets_shuffle.json").out
    found = {f"{size}:{seed}": shuffled(size, seed) for size in SIZES for seed in SEEDS}
    made = {**versions("datasets", "numpy"), "shuffle": found}
    (out / "datasets_shuffle.json").write_text(json.dumps(made, indent=1))
