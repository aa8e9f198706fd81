"""Writer of format pairs. `grain_sft.corpus.formats.pairs` describes the files."""

import numpy as np

from grain_sft.prepare import splits
from grain_sft.prepare.documents import Block
from grain_sft.prepare.pairs import CHOSEN, PROMPT, REJECTED
from grain_sft.prepare.writers.episodes import TOKEN_DTYPE, tasks, write_shard
from grain_sft.prepare.writers.plan import Format, Plan, Task
from grain_sft.types import Array


def write(plan: Plan, task: Task) -> None:
    """Write the files of one shard, `pairs.idx` last."""
    write_shard(plan, task, "pairs.idx", "mask.bin", _columns)


def _columns(block: Block) -> tuple[Array, list[Array]]:
    """Return the mask, and three arrays int64 [pairs]: lengths of prompts, chosen and rejected responses."""
    num_pairs = len(block.lengths)
    pairs = np.arange(num_pairs).repeat(block.lengths)  # pair of each token
    # `block.loss` states the part of each token: see `Format.of_pairs`
    lengths = [np.bincount(pairs[block.loss == part], minlength=num_pairs) for part in (PROMPT, CHOSEN, REJECTED)]
    return (block.loss != 0).astype(np.uint8), lengths


def finish(plan: Plan) -> None:
    """Write sources and metadata."""
    plan.write_metadata()
    ids = {"eot_token_id": plan.end_of_document(), "pad_token_id": plan.tokenizer.get("pad_token_id")}
    plan.write_json("dataset_metadata.json", {"token_dtype": TOKEN_DTYPE.name, **ids})


FORMAT = Format(
    splits.by_random_state, lambda plan: None, tasks, write, finish, drops_untrainable=True, of_pairs=True,
    max_seed=(1 << 32) - 1,
)  # fmt: skip
