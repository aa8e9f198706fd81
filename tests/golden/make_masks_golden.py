"""Write `masks_epoch.json` with the original OLMo-core: an epoch of `NumpyPackedFSLDataset` with `label_mask_paths`.

It holds, for each case of `tests/packed_corpora.py` with masks and no two documents of one length (so that no order of
equal lengths, which depends on the CPU, plays a part), the number of rows, how many positions take loss, and a digest of
every row's tokens and label mask. Needed: ai2-olmo-core 3.0.0.
"""

from __future__ import annotations

import json
from typing import Any

from make_packed_golden import opened
from making import options, versions

from packed_corpora import MASK_CASES, PackedCase, epoch_digest  # isort: skip


def epoch_of(case: PackedCase) -> dict[str, Any]:
    """Return what OLMo-core makes of one case."""
    with opened(case) as (dataset, corpus, _):
        items = [dataset[number] for number in range(len(dataset))]
        return {
            "corpus": corpus,
            "rows": len(items),
            "supervised": sum(int(item["label_mask"].sum()) for item in items),
            "epoch": epoch_digest((item["input_ids"], item["label_mask"]) for item in items),
        }


if __name__ == "__main__":
    out = options("masks_epoch.json").out
    cases = {case.name: epoch_of(case) for case in MASK_CASES}
    made = {"made_by": versions("ai2-olmo-core", "numpy", "torch"), "cases": cases}
    (out / "masks_epoch.json").write_text(json.dumps(made, indent=1) + "\n")
