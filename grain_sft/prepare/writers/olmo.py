"""Format olmo: the files of open-instruct's `convert_sft_data_for_olmocore.py`, which OLMo-core reads.

Each split has a folder, `train` and, where documents are held out, `val`:
`token_ids_part_NNNN.npy` (raw, the smallest unsigned dtype that holds the vocabulary), `labels_mask_part_NNNN.npy` (raw
bool; none where all tokens take loss, as in plain documents), `token_ids_part_NNNN.csv.gz` (`start,end` of each document,
relative to the part, as Dolma's tokenizer writes). A part may end inside a document.
"""

import dataclasses
import gzip
from typing import Any

import numpy as np

from grain_sft.corpus import LABEL_MASKS
from grain_sft.prepare import splits
from grain_sft.prepare.writers.plan import Format, Plan, Task, refuse_weights, whole_files
from grain_sft.storage import files


def tasks(plan: Plan, split: str) -> list[Task]:
    """Return parts of `part_bytes` of tokens; the last one is shorter."""
    size = max(1, plan.request.part_bytes // plan.documents.token_dtype.itemsize)
    ends = plan.ends(split)
    total = int(ends[-1]) if len(ends) else 0
    cuts = np.append(np.arange(0, max(1, total), size), total)
    first = np.searchsorted(ends, cuts[:-1], side="right")  # the document that holds each cut
    skip = cuts[:-1] - np.append(0, ends)[first]
    stop = np.append(first[1:] + (skip[1:] > 0), len(ends))
    parts = np.stack([first, stop, skip, np.diff(cuts)], axis=1).tolist()
    return [Task(split, number, *part) for number, part in enumerate(parts)]


def write(plan: Plan, task: Task) -> None:
    """Write one part: its boundaries and, unless all tokens take loss, its mask, and its tokens last."""
    names = ("token_ids_part_{:04d}.npy", "token_ids_part_{:04d}.csv.gz", "labels_mask_part_{:04d}.npy")
    paths = [plan.path(task.split, name.format(task.number)) for name in names[: 3 if plan.masked else 2]]
    if files.exists(paths[0]):
        return  # a part that an earlier run has finished
    with whole_files(paths) as (tokens, raw, *masks), gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as boundaries:
        skip, left = task.skip, task.tokens
        for block in plan.blocks(task):
            stop = min(len(block.tokens), skip + left)
            tokens.write(block.tokens[skip:stop].tobytes())
            for mask in masks:
                mask.write(block.loss[skip:stop].astype(np.bool_).tobytes())
            ends = np.clip(np.cumsum(block.lengths), skip, stop) - skip + (task.tokens - left)
            starts = np.concatenate([[task.tokens - left], ends[:-1]])
            pairs = zip(starts.tolist(), ends.tolist(), strict=True)
            boundaries.write("".join(f"{start},{end}\n" for start, end in pairs if end > start).encode())
            left -= stop - skip
            skip = 0


def finish(plan: Plan) -> None:
    """Write sources, metadata and statistics of every split."""
    plan.write_sources("{}/sources.bin".format)
    plan.write_metadata()
    for split in plan.splits:
        _write_statistics(plan, split)


def _write_statistics(plan: Plan, split: str) -> None:
    counts = plan.statistics[split]
    overall: dict[str, Any] = {
        "total_instances": counts.documents,
        "total_tokens": counts.tokens,
        "trainable_tokens": counts.trainable_tokens,
        "trainable_percentage": 100 * counts.trainable_tokens / counts.tokens if counts.tokens else 0.0,
        "average_sequence_length": counts.tokens / counts.documents if counts.documents else 0.0,
        "truncated_instances": counts.truncated,
        "truncated_tokens": counts.cut_tokens,
        "truncated_trainable_tokens": counts.cut_trainable_tokens,
    }
    configuration = {
        "tokenizer": plan.request.tokenizer,
        "tokenizer_sha256": plan.tokenizer["sha256"],
        "max_seq_length": plan.request.max_length,
        "chat_template_name": plan.request.template,
        "token_dtype": plan.documents.token_dtype.name,
        "eos_token_id": plan.tokenizer.get("eos_token_id"),
        "pad_token_id": plan.tokenizer.get("pad_token_id"),
        "seed": plan.request.seed,
        "datasets": [dataclasses.asdict(dataset) for dataset in plan.request.datasets],
        **({} if plan.masked else {LABEL_MASKS: False}),
    }
    # boundary files don't tell whether a document without EOS at the end of a part continues in the next
    continued = [task.number for task in tasks(plan, split) if task.skip]
    statistics = {"configuration": configuration, "overall_statistics": overall, "continued_parts": continued}
    plan.write_json(f"{split}/dataset_statistics.json", statistics)
    lines = [f"{name}: {value}" for name, value in {**configuration, **overall}.items() if name != "datasets"]
    files.write_bytes(plan.path(split, "dataset_statistics.txt"), ("\n".join(lines) + "\n").encode())


FORMAT = Format(
    splits.by_datasets_shuffle,
    refuse_weights,
    tasks,
    write,
    finish,
    drops_untrainable=True,
    found_by_eos=True,
    holds_empty=False,
)
