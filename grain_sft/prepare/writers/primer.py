"""Writer of format primer. `grain_sft.corpus.formats.primer` describes the files."""

from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.corpus import IGNORED
from grain_sft.errors import PrepareError, StorageError
from grain_sft.prepare import splits
from grain_sft.prepare.templates.primer import SPECIAL_TOKENS
from grain_sft.prepare.writers.plan import Format, Plan, SplitStatistics, Task, refuse_weights, whole_files, whole_split
from grain_sft.storage import files

SHARD = "shard_00000"


def check(plan: Plan) -> None:
    """Refuse vocabularies of more than 65,536 ids, and loss weights other than 0 and 1."""
    if plan.tokenizer["vocab_size"] > 1 << 16:
        problem = f"this tokenizer has {plan.tokenizer['vocab_size']} ids; expected at most 65,536 (uint16)"
        raise PrepareError(f"format primer: {problem}. Choose another tokenizer or format.")
    refuse_weights(plan)


def write(plan: Plan, task: Task) -> None:
    """Write the files of a whole split, the index last."""
    paths = [plan.path(f"{task.split}_{name}") for name in ("idx.npy", "input_ids.bin", "labels.bin")]
    if files.exists(paths[0]):
        return  # an earlier run has finished this split
    with whole_files(paths) as (index, tokens, labels):
        np.save(index, np.append(0, plan.ends(task.split)[:-1]).astype("<i8"), allow_pickle=False)
        for block in plan.blocks(task):
            tokens.write(plan.stored(block, "<u2").tobytes())
            labels.write(np.where(block.loss, block.tokens.astype("<i4"), IGNORED).astype("<i4").tobytes())


def finish(plan: Plan) -> None:
    """Write sources, metadata, links and `meta.json`."""
    special = plan.tokenizer.get("special_tokens", {})
    plan.write_metadata(SPECIAL_TOKENS["eot"], sources="{}_sources.bin".format)
    split_figures: dict[str, Any] = {}
    for split in ("train", "val"):
        counts = plan.statistics.get(split, SplitStatistics())
        split_figures[split] = {
            "num_examples": counts.documents,
            "num_tokens": counts.tokens,
            "num_label_tokens": counts.trainable_tokens,
            "num_shards": int(split in plan.splits),
            "shard_size": counts.tokens,
        }
        if split in plan.splits:
            _link(plan, split)
    metadata = {
        "source": plan.request.source or "primer",
        "tokenizer_sha256": plan.tokenizer["sha256"],
        "vocab_size": plan.tokenizer["vocab_size"],
        "special_token_ids": {name: special.get(text) for name, text in SPECIAL_TOKENS.items()},
        "splits": split_figures,
        "val_frac": plan.request.val_frac,
        "seed": plan.request.seed,
        "T_max": plan.request.max_length,
        "token_dtype": "uint16-le",
        "label_dtype": "int32-le",
        "train_examples": split_figures["train"]["num_examples"],
        "val_examples": split_figures["val"]["num_examples"],
        "split_rule": "by example: random.Random(seed).shuffle, the first floor(N * val_frac) are val",
    }
    plan.write_json("meta.json", metadata)


def _link(plan: Plan, split: str) -> None:
    """Link `SPLIT/shard_00000*` to the split's files, because niels_gpt, which reads this format, also opens
    these names.
    """
    if files.is_remote(plan.folder):  # buckets have no links
        return
    folder = Path(plan.path(split))
    try:
        for suffix, target in ((".bin", "input_ids.bin"), ("_labels.bin", "labels.bin"), ("_idx.npy", "idx.npy")):
            link = folder / f"{SHARD}{suffix}"
            link.unlink(missing_ok=True)
            link.symlink_to(f"../{split}_{target}")
    except OSError as error:
        fix = "Write to a file system that has symbolic links and space"
        raise StorageError(f"{folder}: links can't be written ({error.strerror}). {fix}.") from error


FORMAT = Format(splits.by_random_shuffle, check, whole_split, write, finish, holds_empty=False)
