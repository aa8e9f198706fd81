"""Writer of format episodes. `grain_sft.corpus.formats.episodes` describes the files.

Tokens are uint32, as the tools of MyPT write them, although the documentation of MyPT states uint16.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from grain_sft.errors import PrepareError
from grain_sft.prepare import splits
from grain_sft.prepare.documents import Block
from grain_sft.prepare.writers.plan import Format, Plan, SplitStatistics, Task, whole_files
from grain_sft.storage import files
from grain_sft.types import Array

TOKEN_DTYPE = np.dtype("<u4")
MAX_SHARDS = 100_000
"""Maximum number of shards of a split. Readers sort names as texts, so shard_100000 would come before shard_20000."""
ENDS = ("<myPT_eot>", "<|eot|>")
"""Special tokens that end a conversation: in tokenizers of MyPT, and in those of `train_tokenizer`."""


def tasks(plan: Plan, split: str) -> list[Task]:
    """Return one task for each shard: whole documents of at most `shard_tokens` tokens in total, or one longer document."""
    token_ends = np.append(0, plan.ends(split))  # 0, then the end of each document
    num_documents = len(token_ends) - 1
    shards: list[Task] = []
    start = 0
    while start < num_documents or not shards:  # an empty split has one empty shard
        # `token_ends[stop]` is the last end within the limit
        stop = int(np.searchsorted(token_ends, token_ends[start] + plan.request.shard_tokens, side="right")) - 1
        stop = min(max(stop, start + 1), num_documents)
        shards.append(Task(split, len(shards), start, stop, 0, int(token_ends[stop] - token_ends[start])))
        start = stop
    if len(shards) > MAX_SHARDS:
        problem = f"{len(shards)} shards in {split}; expected at most {MAX_SHARDS}"
        raise PrepareError(f"shard_tokens={plan.request.shard_tokens}: {problem}. Give more (--tokens-per-shard).")
    return shards


def write(plan: Plan, task: Task) -> None:
    """Write the files of one shard."""
    mask_name, mask_dtype = ("mask.bin", np.uint8) if plan.binary else ("mask_weighted.bin", np.float32)
    write_shard(plan, task, "episodes.idx", mask_name, lambda block: (block.loss.astype(mask_dtype), [block.lengths]))


def write_shard(
    plan: Plan, task: Task, index_name: str, mask_name: str, columns: Callable[[Block], tuple[Array, list[Array]]]
) -> None:
    """Write one shard, its index last.

    Args:
      index_name, mask_name: Names of the files for the index and the mask.
      columns: Function that returns the mask of a block's tokens, and the columns of the index after its first column, which
        has the documents' starts.
    """
    folder = plan.path(task.split, f"shard_{task.number:05d}")
    paths = [files.join(folder, name) for name in (index_name, mask_name, "tokens.bin")]
    if files.exists(paths[0]):
        return  # an earlier run has finished this shard
    start = 0  # number of tokens written to the shard
    with whole_files(paths) as (index, mask, tokens):
        for block in plan.blocks(task):
            tokens.write(plan.stored(block, TOKEN_DTYPE).tobytes())
            mask_values, other_columns = columns(block)
            mask.write(mask_values.tobytes())
            starts = start + np.cumsum(block.lengths) - block.lengths
            index.write(np.stack([starts, *other_columns], axis=1).astype("<u8").tobytes())
            start += int(block.lengths.sum())


def finish(plan: Plan) -> None:
    """Write sources, metadata and the tokenizer's state."""
    tokenizer = plan.tokenizer
    plan.write_metadata(*ENDS)
    metadata: dict[str, Any] = {
        "schema": "episode_indexed_sft_v1",
        "has_loss_mask": True,
        "weighted_mask": not plan.binary,
        "dataset_type": "toolcall_sft" if plan.tool_calls else "chat_sft",
        "num_conversations": sum(counts.documents for counts in plan.statistics.values()),
    }
    for split in ("train", "val"):
        counts = plan.statistics.get(split, SplitStatistics())
        metadata[f"num_{split}_episodes"] = counts.documents
        metadata[f"num_{split}_tokens"] = counts.tokens
        metadata[f"num_{split}_shards"] = len(tasks(plan, split)) if split in plan.splits else 0
        metadata[f"{split}_mask_ratio"] = counts.trainable_tokens / counts.tokens if counts.tokens else 0.0
    metadata |= {
        "tokenization": tokenizer["kind"],
        "tokenizer_sha256": tokenizer["sha256"],
        "vocab_size": tokenizer["vocab_size"],
        "token_dtype": TOKEN_DTYPE.name,
        "eot_token_id": plan.end_of_document(*ENDS),
        "pad_token_id": tokenizer.get("pad_token_id"),
        "tokens_per_shard": plan.request.shard_tokens,
        "val_split": plan.request.val_frac,
        "seed": plan.request.seed,
        "max_length": plan.request.max_length,
        "special_tokens_used": sorted(tokenizer.get("special_tokens", {})),
    }
    plan.write_json("tokenizer_state.json", {"token_kind": tokenizer["kind"], "chars": None, **tokenizer})
    plan.write_json("dataset_metadata.json", metadata)


FORMAT = Format(splits.by_random_state, lambda plan: None, tasks, write, finish, max_seed=(1 << 32) - 1)
