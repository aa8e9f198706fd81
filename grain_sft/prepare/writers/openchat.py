"""Format openchat: the Parquet files of OpenChat's `generate_dataset`.

A row is a document: total_length, num_seqs, seqlens, nz_input_ids, nz_position_ids, nz_shifted_label_ids and
nz_shifted_loss_weights, the last two shifted one to the left. The weight of a first token, which the shift loses, is in
`PREFIX.SPLIT.first_weights.bin` (float32) where any is not 0.
"""

import json
from typing import Any

import numpy as np

from grain_sft.corpus import METADATA_KEY
from grain_sft.errors import import_extra
from grain_sft.prepare import splits
from grain_sft.prepare.documents import Block
from grain_sft.prepare.writers.plan import Format, Plan, Task, whole_split
from grain_sft.storage import files

PREFIX = "openchat"
NAMES = {"train": "train", "val": "eval"}
PAD_TOKEN_ID = 0  # OpenChat's label where no loss is taken


def check(plan: Plan) -> None:
    """Refuse to write without pyarrow."""
    _arrow()


def write(plan: Plan, task: Task) -> None:
    """Write a whole split."""
    path = plan.path(f"{PREFIX}.{NAMES[task.split]}.parquet")
    if files.exists(path):
        return  # a split that an earlier run has finished
    arrow, parquet = _arrow()
    integers, weights = arrow.list_(arrow.int32()), arrow.list_(arrow.float32())
    names = ("seqlens", "nz_input_ids", "nz_position_ids", "nz_shifted_label_ids")
    fields = [("total_length", arrow.int32()), ("num_seqs", arrow.float32()), *((name, integers) for name in names)]
    fields.append(("nz_shifted_loss_weights", weights))
    metadata = {"model_type": plan.request.source or plan.request.template}
    name = files.name_of(plan.request.tokenizer) if plan.request.tokenizer else None
    described = plan.metadata(task.split)
    described |= {"tokenizer": name, "source_names": []}  # paths are in prepare.json
    schema = arrow.schema(fields, {"metadata_json": json.dumps(metadata), METADATA_KEY: json.dumps(described)})
    with files.atomic_write(path, "wb") as file, parquet.ParquetWriter(file, schema) as writer:
        for block in plan.blocks(task):
            writer.write_table(_table(arrow, schema, block))


def _table(arrow: Any, schema: Any, block: Block) -> Any:
    """Return one row group: whole columns at once."""
    lengths, tokens = block.lengths, block.tokens.astype(np.int32)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    weights = block.loss.astype(np.float32)
    labels = np.where(weights != 0, tokens, PAD_TOKEN_ID).astype(np.int32)
    shifted_labels, shifted_weights = np.roll(labels, -1), np.roll(weights, -1)
    lasts = ends[lengths > 0] - 1
    shifted_labels[lasts], shifted_weights[lasts] = PAD_TOKEN_ID, 0
    sums = np.add.reduceat(np.append(shifted_weights.astype(np.float64), 0.0), starts) if len(lengths) else lengths
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat(starts, lengths).astype(np.int32)
    lengths = arrow.array(lengths.astype(np.int32))
    ones = arrow.array(np.arange(len(lengths) + 1, dtype=np.int32))
    offsets = arrow.array(np.concatenate([[0], ends]).astype(np.int32))
    of_tokens = (tokens, positions, shifted_labels, shifted_weights)
    columns = [
        lengths,
        arrow.array(np.where(block.lengths > 0, sums, 0).astype(np.float32)),
        arrow.ListArray.from_arrays(ones, lengths),
        *(arrow.ListArray.from_arrays(offsets, arrow.array(values)) for values in of_tokens),
    ]
    return arrow.Table.from_arrays(columns, schema=schema)


def finish(plan: Plan) -> None:
    """Write sources, and the weights of first tokens."""
    stems = {split: f"{PREFIX}.{name}" for split, name in NAMES.items()}
    plan.write_sources(lambda split: f"{stems[split]}.sources.bin")
    for split, ids in plan.splits.items() if plan.documents.first_weights else ():
        with files.atomic_write(plan.path(f"{stems[split]}.first_weights.bin"), "wb") as file:
            for block in plan.documents.blocks(ids):
                starts, has_tokens = np.cumsum(block.lengths) - block.lengths, block.lengths > 0
                first = np.zeros(len(starts), "<f4")
                first[has_tokens] = block.loss[starts[has_tokens]]
                file.write(first.tobytes())


def _arrow() -> tuple[Any, Any]:
    pyarrow = import_extra("pyarrow", "format openchat: writing Parquet", "pyarrow", "parquet")
    return pyarrow, import_extra("pyarrow.parquet", "format openchat: writing Parquet", "pyarrow", "parquet")


FORMAT = Format(
    splits.by_random_shuffle,
    check,
    whole_split,
    write,
    finish,
    split_paths={split: f"{PREFIX}.{name}.parquet" for split, name in NAMES.items()},
)
