"""Writer of format megatron: the files of Megatron's `IndexedDatasetBuilder`.

The files are `text_document.bin` and `text_document.idx` in the folders `train` and `val`. Each document is one sequence, and
all tokens take loss.
"""

import numpy as np

from grain_sft.corpus import megatron_index
from grain_sft.errors import PrepareError
from grain_sft.prepare import splits
from grain_sft.prepare.writers.plan import Format, Plan, Task, refuse_weights, whole_files, whole_split
from grain_sft.storage import files

NAME = "text_document"
"""Name of the two files, as in Megatron's `preprocess_data`."""

_UINT16_VOCABULARY = 65_500  # megatron-core's `DType.optimal_dtype` stores smaller vocabularies as uint16
_MAX_LENGTH = (1 << 31) - 1  # tokens; the index stores lengths as int32


def check(plan: Plan) -> None:
    """Refuse weights other than 0 and 1, and documents of more than 2**31 - 1 tokens."""
    refuse_weights(plan)
    longest = max(int(plan.documents.lengths[ids].max(initial=0)) for ids in plan.splits.values())
    if longest > _MAX_LENGTH:
        raise PrepareError(f"format megatron: a document has {longest:,} tokens; expected at most {_MAX_LENGTH:,}. Divide it.")


def write(plan: Plan, task: Task) -> None:
    """Write both files of a split, the index last."""
    index_path, tokens_path = (plan.path(task.split, f"{NAME}.{suffix}") for suffix in ("idx", "bin"))
    if files.exists(index_path):
        return  # an earlier run has finished this split
    dtype = np.dtype("uint16" if plan.tokenizer["vocab_size"] < _UINT16_VOCABULARY else "int32")
    with whole_files([index_path, tokens_path]) as (index, tokens):
        for block in plan.blocks(task):
            tokens.write(plan.stored(block, dtype).tobytes())
        sizes = plan.documents.lengths[plan.splits[task.split]]
        for part in megatron_index.encode(dtype, sizes):
            index.write(part)


FORMAT = Format(
    splits.by_random_state, check, whole_split, write, Plan.write_metadata, holds_loss=False, max_seed=(1 << 32) - 1
)
