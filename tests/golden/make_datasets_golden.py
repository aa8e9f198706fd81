"""Write `datasets_shuffle.json` beside this script: what `datasets.Dataset.shuffle(seed=...)` gives.

Needed: datasets (5.2.0 made the file that is checked in) and numpy. Not needed to run the tests.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np

SIZES = (1, 2, 10, 57, 1000, 200003)
SEEDS = (0, 42, 34521)


def main() -> None:
    made: dict[str, Any] = {name: importlib.metadata.version(name) for name in ("datasets", "numpy")}
    made["shuffle"] = {}
    for size in SIZES:
        for seed in SEEDS:
            rows = list(datasets.Dataset.from_dict({"i": list(range(size))}).shuffle(seed=seed)["i"])
            digest = hashlib.sha256(np.array(rows, "<i8").tobytes()).hexdigest()
            made["shuffle"][f"{size}:{seed}"] = {"first": rows[:10], "sha256": digest}
    Path(__file__).with_name("datasets_shuffle.json").write_text(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
