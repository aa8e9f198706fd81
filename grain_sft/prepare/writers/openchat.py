"""Writer of format openchat: the Parquet files of OpenChat's `generate_dataset`, `openchat.train.parquet` and
`openchat.eval.parquet`.

Each row of a file is a document. Labels and weights are shifted one place to the left, so a row lacks the weight of the
document's first token. If the first token of any document has a weight other than 0, `openchat.train.first_weights.bin` or
`openchat.eval.first_weights.bin` has the weight of every document's first token as float32.
"""

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from grain_sft.corpus import METADATA_KEY
from grain_sft.errors import import_extra
from grain_sft.prepare import splits
from grain_sft.prepare.documents import Block
from grain_sft.prepare.writers.plan import Format, Plan, Task, whole_split
from grain_sft.storage import files

PREFIX = "openchat"
NAMES = {"train": "train", "val": "eval"}
PAD_TOKEN_ID = 0  # OpenChat's label of a token without loss


def check(plan: Plan) -> None:
    """Raise a MissingExtraError if pyarrow, which writes Parquet, is not installed."""
    import_extra("pyarrow.parquet", "format openchat: writing Parquet", "pyarrow", "parquet")


def write(plan: Plan, task: Task) -> None:
    """Write a whole split, the Parquet file last."""
    path = plan.path(f"{PREFIX}.{NAMES[task.split]}.parquet")
    if files.exists(path):
        return  # an earlier run has finished this split
    import pyarrow as arrow
    from pyarrow import parquet

    integers, weights = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())
    fields = [
        ("total_length", arrow.int32()), ("num_seqs", arrow.float32()), ("seqlens", integers), ("nz_input_ids", integers),
        ("nz_position_ids", integers), ("nz_shifted_label_ids", integers), ("nz_shifted_loss_weights", weights),
    ]  # fmt: skip
    openchat_metadata = {"model_type": plan.request.source or plan.request.template}
    tokenizer_name = files.name_of(plan.request.tokenizer) if plan.request.tokenizer else None
    metadata = plan.metadata(task.split)
    metadata |= {"tokenizer": tokenizer_name, "source_names": []}  # the manifest prepare.json has the paths of the inputs
    schema = arrow.schema(fields, {"metadata_json": json.dumps(openchat_metadata), METADATA_KEY: json.dumps(metadata)})
    with files.atomic_write(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:
        first_weights = [np.empty(0, "<f4")]
        for block in plan.blocks(task):
            writer.write_table(_table(arrow, schema, block._replace(tokens=plan.stored(block, np.int32))))
            first_weights.append(_first_weights(block))
        sidecar = np.concatenate(first_weights)
        if sidecar.any():
            files.write_bytes(plan.path(f"{PREFIX}.{NAMES[task.split]}.first_weights.bin"), sidecar.tobytes())


def _first_weights(block: Block) -> npt.NDArray[np.float32]:
    """Return the weight of each document's first token: float32 [documents], 0 for an empty document."""
    starts = np.cumsum(block.lengths) - block.lengths
    has_tokens = block.lengths > 0
    weights = np.zeros(len(starts), "<f4")
    weights[has_tokens] = block.loss[starts[has_tokens]]
    return weights


def _table(arrow: Any, schema: Any, block: Block) -> Any:
    """Return the rows of the documents of a block, as a table of pyarrow."""
    lengths, tokens = block.lengths, block.tokens
    ends = np.cumsum(lengths)
    starts = ends - lengths
    last_tokens = ends[lengths > 0] - 1
    shifted_weights = np.roll(block.loss.astype(np.float32), -1)
    shifted_weights[last_tokens] = 0
    shifted_labels = np.where(shifted_weights != 0, np.roll(tokens, -1), PAD_TOKEN_ID)
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32)
    rows = np.repeat(np.arange(len(lengths)), lengths)  # row of each token
    # OpenChat's num_seqs is the sum of a row's weights
    num_seqs = np.bincount(rows, weights=shifted_weights, minlength=len(lengths)).astype(np.float32)
    one_each = arrow.array(np.arange(len(lengths) + 1, dtype=np.int32))  # offsets of lists of one value
    offsets = arrow.array(np.concatenate([[0], ends]).astype(np.int32))
    token_columns = (tokens, positions, shifted_labels, shifted_weights)
    columns = [
        arrow.array(lengths.astype(np.int32)),
        arrow.array(num_seqs),
        arrow.ListArray.from_arrays(one_each, arrow.array(lengths.astype(np.int32))),
        *(arrow.ListArray.from_arrays(offsets, arrow.array(values)) for values in token_columns),
    ]
    return arrow.Table.from_arrays(columns, schema=schema)


def finish(plan: Plan) -> None:
    """Write the sources of each split."""
    plan.write_sources(lambda split: f"{PREFIX}.{NAMES[split]}.sources.bin")


FORMAT = Format(
    splits.by_random_shuffle, check, whole_split, write, finish,
    split_paths={split: f"{PREFIX}.{name}.parquet" for split, name in NAMES.items()},
)  # fmt: skip
