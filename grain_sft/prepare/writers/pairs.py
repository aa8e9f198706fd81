"""Format pairs: preference pairs in the files of format episodes, with `pairs.idx` in place of `episodes.idx`.

`pairs.idx` is uint64 (start, prompt, chosen, rejected): the first token of a pair, and the numbers of tokens of its parts.
"""

import numpy as np

from grain_sft.prepare import splits
from grain_sft.prepare.writers.episodes import TOKEN_DTYPE, tasks
from grain_sft.prepare.writers.plan import Format, Plan, Task, whole_files
from grain_sft.storage import files


def write(plan: Plan, task: Task) -> None:
    """Write one shard, its index last."""
    folder = plan.path(task.split, f"shard_{task.number:05d}")
    paths = [files.join(folder, name) for name in ("pairs.idx", "mask.bin", "tokens.bin")]
    if files.exists(paths[0]):
        return  # a shard that an earlier run has finished
    start = 0
    with whole_files(paths) as (index, mask, tokens):
        for block in plan.blocks(task):
            tokens.write(block.tokens.astype(TOKEN_DTYPE).tobytes())
            mask.write((block.loss != 0).astype(np.uint8).tobytes())
            pair, count = np.arange(len(block.lengths)).repeat(block.lengths), len(block.lengths)
            parts = [np.bincount(pair[block.loss == part], minlength=count) for part in range(3)]
            starts = start + np.cumsum(block.lengths) - block.lengths
            index.write(np.stack([starts, *parts], axis=1).astype("<u8").tobytes())
            start += int(block.lengths.sum())


def finish(plan: Plan) -> None:
    """Write sources and metadata."""
    plan.write_sources("{}/sources.bin".format)
    eos = plan.tokenizer.get("eos_token_id")
    plan.write_metadata(eos)
    metadata = {
        "token_dtype": TOKEN_DTYPE.name,
        "eot_token_id": eos,
        "pad_token_id": plan.tokenizer.get("pad_token_id"),
    }
    plan.write_json("dataset_metadata.json", metadata)


FORMAT = Format(
    splits.by_random_state, lambda plan: None, tasks, write, finish, drops_untrainable=True, of_pairs=True,
    max_seed=(1 << 32) - 1,
)  # fmt: skip
