"""Write `masks_epoch.json` with the original OLMo-core: an epoch of `NumpyPackedFSLDataset` with `label_mask_paths`.

The corpora are those cases of `tests/packed_corpora.py` that have masks and no two documents of one length. So the order in
which OLMo-core packs equal lengths, which depends on the CPU, plays no part. The file holds, for each case, the number of
rows, how many positions take loss, and a digest of every row's tokens and label mask. It holds no code of the original
and is not needed to run the tests.

Needed: ai2-olmo-core 3.0.0 (which brings torch; the CPU build is enough)::

    pip install ai2-olmo-core==3.0.0
    python make_masks_golden.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from make_packed_golden import olmo_dataset
from packed_corpora import MASK_CASES, PackedCase, digest_of_files, epoch_digest, write_case


def epoch_of(case: PackedCase) -> dict[str, Any]:
    """What OLMo-core makes of one case."""
    with tempfile.TemporaryDirectory() as temp:
        folder = Path(temp)
        tokens, masks = write_case(case, folder)
        dataset = olmo_dataset(case, tokens, masks, folder / "work")
        items = [dataset[number] for number in range(len(dataset))]
        return {
            "corpus": digest_of_files([*tokens, *masks]),
            "rows": len(items),
            "supervised": sum(int(item["label_mask"].sum()) for item in items),
            "epoch": epoch_digest((item["input_ids"], item["label_mask"]) for item in items),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write masks_epoch.json.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    arguments = parser.parse_args()
    made_by = {name: importlib.metadata.version(name) for name in ("ai2-olmo-core", "numpy", "torch")}
    made = {"made_by": made_by, "cases": {case.name: epoch_of(case) for case in MASK_CASES}}
    (arguments.out / "masks_epoch.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
