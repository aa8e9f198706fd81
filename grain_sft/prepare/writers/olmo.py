"""Writer of format olmo. `grain_sft.corpus.formats.olmo` describes the files.

Tokens have the smallest unsigned dtype that holds the vocabulary, as OLMo-core expects by default. A document may begin in one
part and end in the next.
"""

import dataclasses
import gzip
import itertools
from typing import Any

import numpy as np

from grain_sft.corpus import LABEL_MASKS
from grain_sft.prepare import splits
from grain_sft.prepare.writers.plan import Format, Plan, Task, refuse_weights, whole_files
from grain_sft.storage import files


def tasks(plan: Plan, split: str) -> list[Task]:
    """Return one task for each part of a split. A part has `part_bytes` bytes of tokens; the last part may have fewer."""
    part_tokens = max(1, plan.request.part_bytes // _token_dtype(plan).itemsize)
    ends = plan.ends(split)
    total = int(ends.max(initial=0))
    parts: list[Task] = []
    for begin in range(0, max(1, total), part_tokens):  # a split without tokens has one empty part
        end = min(begin + part_tokens, total)
        start = int(np.searchsorted(ends, begin, side="right"))  # document of token `begin`
        stop = int(np.searchsorted(ends, end)) + 1  # after the document of token `end - 1`
        document_start = int(ends[start - 1]) if start else 0
        parts.append(Task(split, len(parts), start, stop, begin - document_start, end - begin))
    return parts


def _token_dtype(plan: Plan) -> np.dtype[Any]:
    """Return the dtype of the token files. If the vocabulary is unknown, it is the dtype of the corpus that is converted."""
    smallest = np.min_scalar_type(max(1, plan.tokenizer["vocab_size"] - 1))
    return plan.documents.token_dtype if plan.tokenizer["kind"] == "unknown" else smallest


def write(plan: Plan, task: Task) -> None:
    """Write the files of one part, the tokens last."""
    names = ["token_ids_part_{:04d}.npy", "token_ids_part_{:04d}.csv.gz", "labels_mask_part_{:04d}.npy"]
    paths = [plan.path(task.split, name.format(task.number)) for name in names[: 3 if plan.masked else 2]]
    if files.exists(paths[0]):
        return  # an earlier run has finished this part
    # mtime=0: with a time in it, the zipped file would have other bytes in each run
    with whole_files(paths) as (tokens, zipped, *masks), gzip.GzipFile("", "wb", fileobj=zipped, mtime=0) as boundaries:
        written = 0  # tokens
        start = task.skip  # tokens of the first block that are in earlier parts
        for block in plan.blocks(task):
            stop = min(len(block.tokens), start + task.tokens - written)
            tokens.write(plan.stored(block, _token_dtype(plan))[start:stop].tobytes())
            for mask in masks:
                mask.write(block.loss[start:stop].astype(np.bool_).tobytes())
            ends = np.clip(np.cumsum(block.lengths), start, stop) - start + written  # ends of the documents in the part
            # documents of other parts are empty here, and get no line
            borders = itertools.pairwise([written, *ends.tolist()])
            boundaries.write("".join(f"{first},{end}\n" for first, end in borders if end > first).encode())
            written += stop - start
            start = 0


def finish(plan: Plan) -> None:
    """Write sources, metadata and statistics."""
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
        "token_dtype": _token_dtype(plan).name,
        "eos_token_id": plan.tokenizer.get("eos_token_id"),
        "pad_token_id": plan.tokenizer.get("pad_token_id"),
        "seed": plan.request.seed,
        "datasets": [dataclasses.asdict(dataset) for dataset in plan.request.datasets],
        **({} if plan.masked else {LABEL_MASKS: False}),  # states that the split has no files of label masks
    }
    # numbers of the parts that begin inside a document; the files of boundaries don't show this
    continued = [task.number for task in tasks(plan, split) if task.skip]
    statistics = {"configuration": configuration, "overall_statistics": overall, "continued_parts": continued}
    plan.write_json(f"{split}/dataset_statistics.json", statistics)
    lines = [f"{name}: {value}" for name, value in {**configuration, **overall}.items() if name != "datasets"]
    files.write_bytes(plan.path(split, "dataset_statistics.txt"), ("\n".join(lines) + "\n").encode())


FORMAT = Format(
    splits.by_datasets_shuffle, refuse_weights, tasks, write, finish, drops_untrainable=True, found_by_eos=True,
    holds_empty=False,
)  # fmt: skip
