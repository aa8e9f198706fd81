"""Write what megatron-core makes of the runs in `tests/helpers/megatron_corpora.py`.

`megatron_samples.json` has samples of its `GPTDataset` and `BlendedDataset`, and `megatron_cache/megatron*` their indices.
`megatron_oversampled.json` states which blends it refuses because a data set has too few samples.

Needed: megatron-core 0.16.1 and torch.
"""

import hashlib
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from making import options, versions, write_json
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, get_blend_from_list, normalize
from megatron_corpora import BLEND_SIZE, BLENDS, EOD, FEW, KEPT, LENGTH, oversampled_runs, runs, write_prefixes

TOKENIZER = SimpleNamespace(eod=EOD, eos=EOD, vocab_size=200, unique_identifiers={"made": "up"})
KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def dataset_of(folder: Path, run: dict[str, Any], cache: Path | None = None) -> Any:
    """Return megatron-core's data set of a run. It saves its indices in the folder `cache`, if given."""
    where = [str(folder / each) if isinstance(each, str) else str(each) for each in run["blend"]]
    split = Split[run["subset"]]
    sizes: list[int | None] = [None, None, None]
    if get_blend_from_list(where)[1] is not None:
        sizes = [1, 1, 1]
    sizes[split.value] = run["num_samples"]
    config = GPTDatasetConfig(
        random_seed=run.get("seed", 1234),
        sequence_length=run.get("sequence_length", LENGTH),
        blend=get_blend_from_list(where),
        split=run["split"],
        mid_level_dataset_surplus=run.get("surplus", 0.005),
        path_to_cache=None if cache is None else str(cache),
        tokenizer=TOKENIZER,
        reset_position_ids=run.get("reset_position_ids", False),
        reset_attention_mask=run.get("reset_attention_mask", False),
        eod_mask_loss=run.get("eod_mask_loss", False),
        drop_last_partial_validation_sequence=run.get("drop_last_partial_sequence", True),
        add_extra_token_to_sequence=run.get("add_extra_token_to_sequence", True),
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[split.value]


def golden(dataset: Any) -> dict[str, Any]:
    """Return the number of samples, the hash of each array of the first `FEW` samples, and the tokens of the last of these."""
    digests = {key: hashlib.sha256() for key in KEYS}
    count = min(len(dataset), FEW)
    for number in range(count):
        sample = {key: dataset[number][key].numpy() for key in KEYS}
        for key, array in sample.items():
            digests[key].update(np.ascontiguousarray(array, "u1" if array.dtype == bool else "<i4").tobytes())
    hashes = {key: found.hexdigest()[:16] for key, found in digests.items()}
    return {"samples": len(dataset), **hashes, "last": sample["tokens"].tolist()}


def oversampled(folder: Path, run: dict[str, Any]) -> dict[str, int]:
    """Return the number of samples of a blend. If a data set has too few, return how many are taken of it, and its size."""
    try:
        return {"samples": len(dataset_of(folder, run))}
    except IndexError as error:
        taken, size = re.findall(r"requests (\d+) samples .* excess of its size (\d+)", str(error))[0]
        return {"taken": int(taken), "size": int(size)}


if __name__ == "__main__":
    out = options("megatron_samples.json and megatron_oversampled.json").out
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    found = {}
    for name, run in runs().items():  # each in a folder of its own: the keys of Megatron's cache leave out some options
        with tempfile.TemporaryDirectory() as temporary:
            write_prefixes(Path(temporary))
            cache = out / "megatron_cache" / "megatron_blend" if name == KEPT["megatron_blend"] else None
            found[name] = golden(dataset_of(Path(temporary), run, cache))
            if name == KEPT["megatron"]:
                kept = Path(temporary) / "a" / "cache" / "GPTDataset_indices"
                shutil.copytree(kept, out / "megatron_cache" / "megatron", dirs_exist_ok=True)
    blends = {}
    for name, weights in BLENDS.items():
        index, numbers = np.zeros(BLEND_SIZE, np.int16), np.zeros(BLEND_SIZE, np.int64)
        helpers.build_blending_indices(index, numbers, normalize(weights), len(weights), BLEND_SIZE, False)
        blends[name] = hashlib.sha256(index.astype("<i8").tobytes() + numbers.astype("<i8").tobytes()).hexdigest()[:16]
    made = versions("megatron-core", "torch", "numpy")
    write_json(out / "megatron_samples.json", {**made, "blends": blends, "cases": found}, compact=("cases",))
    refused = {}
    for name, run in oversampled_runs().items():
        with tempfile.TemporaryDirectory() as temporary:
            write_prefixes(Path(temporary))
            refused[name] = oversampled(Path(temporary), run)
    write_json(out / "megatron_oversampled.json", {**made, "cases": refused}, compact=("cases",))
