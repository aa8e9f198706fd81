"""Write `olmo_filter_padding.json` with the original OLMo-core: which padded and packed rows pass its n-gram filter.

The file has the `instance_mask` ("1": it passes) of each row of the documents of `helpers/filter_corpora.py`, and a digest
of the rows' tokens. Needed: ai2-olmo-core 3.0.0, numpy 2.4.6.
"""

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from making import options, versions
from olmo_core.data import LongDocStrategy, NumpyPackedFSLDataset
from olmo_core.data.numpy_dataset import InstanceFilterConfig, NumpyPaddedFSLDataset

from filter_corpora import EOS, PACKED_FILES, PAD, SEQUENCE_LENGTH, write_files  # isort: skip


def verdicts(dataset: Any, work_dir: Path) -> dict[str, Any]:
    dataset.work_dir = work_dir
    dataset.prepare()
    items = [dataset[number] for number in range(len(dataset))]
    tokens = b"".join(item["input_ids"].numpy().astype("<u2").tobytes() for item in items)
    passes = "".join("1" if item["instance_mask"] else "0" for item in items)
    return {"rows": len(items), "passes": passes, "tokens": hashlib.sha256(tokens).hexdigest()[:16]}


if __name__ == "__main__":
    out = options("olmo_filter_padding.json").out
    settings: dict[str, Any] = {"sequence_length": SEQUENCE_LENGTH, "pad_token_id": PAD, "eos_token_id": EOS}
    settings |= {"vocab_size": 60_000, "dtype": np.uint16, "instance_filter_config": InstanceFilterConfig()}
    made: dict[str, Any] = {"made_by": versions("ai2-olmo-core", "numpy", "torch")}
    with tempfile.TemporaryDirectory() as temp:
        paths = [str(path) for path in write_files(Path(temp))]
        made["padded"] = verdicts(NumpyPaddedFSLDataset(*paths, **settings), Path(temp) / "padded")
        packed = NumpyPackedFSLDataset(*paths[:PACKED_FILES], **settings, long_doc_strategy=LongDocStrategy.truncate)
        made["packed"] = verdicts(packed, Path(temp) / "packed")
    (out / "olmo_filter_padding.json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
