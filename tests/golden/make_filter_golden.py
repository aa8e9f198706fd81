"""Write `olmo_filter_padding.json` with the original OLMo-core: verdicts on padded and on packed rows.

The documents are made from seeds by `tests/filter_corpora.py`, which the tests share. The file holds the `instance_mask` of
every row of `NumpyPaddedFSLDataset` and of `NumpyPackedFSLDataset` over them ("1": the row passes), and a digest of the
rows' tokens. It holds no code of the original and is not needed to run the tests.

Needed: ai2-olmo-core 3.0.0 (which brings torch; the CPU build is enough). For example::

    pip install ai2-olmo-core==3.0.0 numpy==2.4.6
    python make_filter_golden.py
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from filter_corpora import EOS, PACKED_FILES, PAD, SEQUENCE_LENGTH, write_files


def verdicts(dataset: Any, work_dir: Path) -> dict[str, Any]:
    """The verdict on every row of one of OLMo-core's datasets, and a digest of all tokens."""
    dataset.work_dir = work_dir
    dataset.prepare()
    digest, mask = hashlib.sha256(), []
    for number in range(len(dataset)):
        item = dataset[number]
        digest.update(item["input_ids"].numpy().astype("<u2").tobytes())
        mask.append("1" if item["instance_mask"] else "0")
    return {"rows": len(mask), "passes": "".join(mask), "tokens": digest.hexdigest()[:16]}


def main() -> None:
    from olmo_core.data import LongDocStrategy, NumpyPackedFSLDataset
    from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyPaddedFSLDataset

    parser = argparse.ArgumentParser(description="Write olmo_filter_padding.json.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    options: dict[str, Any] = {
        "sequence_length": SEQUENCE_LENGTH,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "vocab_size": 60_000,
        "dtype": np.uint16,
        "instance_filter_config": InstanceFilterConfig(),
    }
    made: dict[str, Any] = {
        "made_by": {name: importlib.metadata.version(name) for name in ("ai2-olmo-core", "numpy", "torch")}
    }
    with tempfile.TemporaryDirectory() as temp:
        paths = [str(path) for path in write_files(Path(temp))]
        made["padded"] = verdicts(NumpyPaddedFSLDataset(*paths, **options), Path(temp) / "padded")
        packed = NumpyPackedFSLDataset(*paths[:PACKED_FILES], **options, long_doc_strategy=LongDocStrategy.truncate)
        made["packed"] = verdicts(packed, Path(temp) / "packed")
    for kind in ("padded", "packed"):
        print(kind, made[kind]["rows"], "rows,", made[kind]["passes"].count("0"), "fail")
    target = arguments.out / "olmo_filter_padding.json"
    target.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
