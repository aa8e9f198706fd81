"""Format megatron: `train/text_document.bin` and `.idx`, and those of `val/`, as megatron-core's `IndexedDatasetBuilder` writes
them: a document is one sequence. All tokens take loss. The prefix for Megatron is `OUTPUT/train/text_document`.
"""

import numpy as np

from grain_sft.corpus import megatron_index
from grain_sft.errors import PrepareError
from grain_sft.prepare import splits
from grain_sft.prepare.writers.plan import Format, Plan, Task, refuse_weights, whole_files, whole_split
from grain_sft.storage import files

NAME = "text_document"
"""Name of the two files: Megatron's `preprocess_data` makes it of the key of the text."""

_FITS_UINT16 = 65_500  # megatron-core's `DType.optimal_dtype`: vocabularies below it
_LONGEST = (1 << 31) - 1  # tokens of a sequence


def check(plan: Plan) -> None:
    """Refuse tokens without loss, other weights than 1, and documents whose length int32 can't hold."""
    refuse_weights(plan)
    for split, counts in plan.statistics.items():
        if (silent := counts.tokens - counts.trainable_tokens) > 0:
            raise PrepareError(
                f"format megatron: its files hold tokens alone, and all of them take loss, but {silent:,} of the "
                f"{counts.tokens:,} tokens of {split} take none. Choose a format with masks: olmo, episodes or openchat."
            )
        longest = int(plan.documents.lengths[plan.splits[split]].max(initial=0))
        if longest > _LONGEST:
            raise PrepareError(
                f"format megatron: a document of {longest:,} tokens; expected at most {_LONGEST:,}. Cut it."
            )


def write(plan: Plan, task: Task) -> None:
    """Write the files of a whole split; the index appears last."""
    index_path, tokens_path = (plan.path(task.split, f"{NAME}.{suffix}") for suffix in ("idx", "bin"))
    if files.exists(index_path):
        return  # an earlier run finished the split
    dtype = np.dtype("uint16" if plan.tokenizer["vocab_size"] < _FITS_UINT16 else "int32")
    with whole_files([index_path, tokens_path]) as (index, tokens):
        for block in plan.blocks(task):
            if len(block.tokens) and block.tokens.max() > np.iinfo(dtype).max:
                raise PrepareError(
                    f"{tokens_path}: a token id of {block.tokens.max()}, but the vocabulary has {plan.tokenizer['vocab_size']} "
                    f"ids, for which Megatron stores {dtype}. Give the tokenizer that made the tokens."
                )
            tokens.write(block.tokens.astype(dtype).tobytes())
        sizes = plan.documents.lengths[plan.splits[task.split]]
        for part in megatron_index.encode(dtype, sizes):
            index.write(part)


def finish(plan: Plan) -> None:
    """Write sources and metadata."""
    plan.write_sources("{}/sources.bin".format)
    plan.write_metadata(plan.tokenizer.get("eos_token_id"))


FORMAT = Format(
    splits.by_random_state, check, whole_split, write, finish, holds_loss=False, max_seed=(1 << 32) - 1
)  # fmt: skip
