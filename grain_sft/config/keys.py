"""Every key of a config: its type, its default and its meaning.

Configs are checked against these tables, and `docs/config.md` is written from them (`python docs/config_page.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, get_args

from grain_sft.config.kinds import Kind
from grain_sft.layout.packing import ALGORITHMS, TIES
from grain_sft.sampling import LastBatch, OnExhausted

REQUIRED: Final = "required"
"""Default of a key that a config has to state."""


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of a config.

    Attributes:
      kind: types of its value, or the words that it may be.
      default: value of a config without the key, or text for the page where it is no constant; REQUIRED if the key has to
        be stated.
      meaning: one or two sentences for the page of all keys, in Markdown.
    """

    kind: Kind
    default: Any
    meaning: str

    def __post_init__(self) -> None:
        if not self.meaning.endswith("."):
            raise ValueError(f"Key(meaning={self.meaning!r}): expected a sentence.")


Table = Mapping[str, Key]

COUNT_OR_NONE: Kind = (int, type(None))

TOP: Table = {
    "inherits": Key(
        str, None, "Path of a config that this one is laid over: sections are merged, lists are replaced whole."
    ),
    "transforms": Key(
        list,
        ["shift_targets"],
        "Transforms of each batch, in order. An item is a name, or `{name: {option: value}}`.",
    ),
    "audit": Key(
        str,
        None,
        "Local path, without an ending, of a log of the batches that were handed out: `logs/audit` makes `logs/audit.log` "
        "and `logs/audit.jsonl`. The first host writes it.",
    ),
}
"""Keys beside the sections."""

CORPUS: Table = {
    "path": Key(
        (str, list),
        "this or `mixture`",
        "Where the tokens are: a directory, a glob, a mix file, a saved index, a token file, or a list of these; local or "
        "a URL. A relative path starts at the folder of the config or, if nothing is there, at the working directory.",
    ),
    "mixture": Key(dict, None, "Several corpora with weights, by name. See [sources](#sources-of-a-mixture)."),
    "format": Key(
        str,
        "auto",
        "Format of the files: `files`, `mix`, `index`, `olmo`, `episodes`, `primer`, `openchat`, `rows`, or a class of yours "
        "as `package.module:Name`. `auto` infers it from what `path` names.",
    ),
    "dtype": Key(
        str,
        None,
        "Type of tokens in files without a header: `uint8`, `uint16`, `uint32` or `uint64`. Without it, "
        "as the corpus states it, else uint32.",
    ),
    "eos_token_id": Key(int, None, "Id of the token that ends a document. Without it, as the corpus states it."),
    "path_remap": Key(
        dict, {}, 'Replacements in the paths of a mix or an index: `{prefix: replacement}` or `{"{NAME}": text}`.'
    ),
    "tokenizer": Key(
        str,
        None,
        "Name or path of the tokenizer. A corpus that was made with another one is refused. It also fills `{TOKENIZER}` in the "
        "paths of a mix.",
    ),
    "remote": Key(
        dict,
        None,
        "How files in a bucket are read; see [remote files](#remote-files).",
    ),
    "root": Key(str, None, "Folder that all token files have to lie in. Without it, they may lie anywhere."),
    "pad_token_id": Key(
        COUNT_OR_NONE,
        "the corpus's",
        "Id of the token that fills rows; `null` is the token that ends a document. A corpus that states none is filled "
        "with its EOS token, or with 0.",
    ),
    "label_mask_paths": Key(
        (str, list),
        None,
        "Label masks (a byte a token, 0 or 1), one for each token file in order: a glob, or a list of files and globs. Without "
        "it, the masks that are beside the token files. A relative path starts where that of `path` does.",
    ),
    "use_loss_mask": Key(
        bool,
        None,
        "`false`: ignore loss masks and weights, so that every token takes loss. `true`: refuse a corpus without them. Without "
        "it, masks are used where they are.",
    ),
}

REMOTE: Table = {
    "seconds": Key((int, float), 120, "Time in which failing requests for a file are repeated before it is an error."),
    "requests": Key(int, 64, "Requests that one read makes at once."),
    "cache": Key((dict, type(None)), None, "A local copy of what was read: `folder`, `max_bytes` and `unit`."),
    "cache.folder": Key(str, REQUIRED, "Folder on a local disk. Nothing else may be in it."),
    "cache.max_bytes": Key((int, str), REQUIRED, "Bound on its size, such as `200GiB`."),
    "cache.unit": Key((int, str), "4MiB", "Bytes that are fetched and kept together, or `shard`."),
}
"""Keys of `corpus.remote`."""

LAYOUT: Table = {
    "kind": Key(
        ("windows", "padded", "packed", "materialized"),
        REQUIRED,
        "How rows are made: `windows` are consecutive tokens, `padded` is one document a row, `packed` is several, and "
        "`materialized` reads rows that `grain-sft pack --materialize` wrote.",
    ),
    "sequence_length": Key(int, REQUIRED, "Tokens of a row."),
}
"""Keys of a layout of any kind."""

LAYOUT_OPTIONS: Mapping[str, Table] = {
    "windows": {},
    "padded": {
        "keep": Key(("last", "first"), "last", "Which tokens remain of a document that is longer than a row."),
        "min_tokens": Key(int, 2, "Shorter documents are left out."),
    },
    "packed": {
        "algorithm": Key(
            tuple(ALGORITHMS), "best_fit_decreasing", "Which documents share a row. See [packing](packing.md)."
        ),
        "long_documents": Key(
            ("truncate", "fragment"),
            "truncate",
            "Documents longer than a row are cut to its length, or divided into pieces of it.",
        ),
        "source_group_size": Key(int, 1, "Number of consecutive shards whose documents are packed together."),
        "ties": Key(
            TIES,
            "stable",
            "Order of documents of equal length. `stable` is the same on every machine; the others replay numpy's sort.",
        ),
        "max_segments": Key(COUNT_OR_NONE, None, "Bound on the documents of a row."),
        "boundaries": Key(
            ("auto", "eos"), "auto", "Where documents end: as the corpus states it, or after each EOS token."
        ),
        "bos_token_id": Key(COUNT_OR_NONE, None, "If given, an EOS ends a document only where this token follows."),
        "seed": Key(
            int,
            0,
            "Seed of an algorithm that packs each epoch anew (`shuffled_best_fit`, `multipack`), which requires it.",
        ),
        "epochs": Key(int, 1, "Epochs that such an algorithm packs."),
        "batch_rows": Key(
            int, "`sampler.global_batch_size`", "Rows of a global batch of `multipack`, which makes whole batches."
        ),
    },
    "materialized": {},
}
"""Keys that a layout of each kind takes besides those of LAYOUT."""

SAMPLER: Table = {
    "order": Key(
        str,
        "shuffle",
        "Order of the rows in an epoch. `olmo`, `maxtext`, `episode` and `openchat` replay these systems; `random` draws "
        "with replacement.",
    ),
    "seed": Key(int, REQUIRED, "Seed of the order, 0 or more."),
    "global_batch_size": Key(int, "this or `global_batch_tokens`", "Rows of a step, of all hosts together."),
    "global_batch_tokens": Key(
        int, "this or `global_batch_size`", "The same in tokens: a multiple of `layout.sequence_length`."
    ),
    "epochs": Key(int, None, "Epochs after which the pipeline ends. Without it, never."),
    "shuffle": Key(bool, True, "`false` reads rows as they are numbered, divided between hosts as `order` does."),
    "last_batch": Key(
        get_args(LastBatch),
        "drop",
        "At the end of an epoch, rows that do not fill a step: `drop` them, `fill` the step with rows that take no loss, "
        "or let the next epoch `run_on` in it.",
    ),
    "schedule": Key(list, [], "Changes of the batch or of weights at a step. See [schedules](#schedules)."),
    "on_exhausted": Key(
        get_args(OnExhausted),
        "repeat",
        "For a mixture, when a source has no rows left: `repeat` it, `stop`, or `renormalize` the other weights.",
    ),
}

SOURCE: Table = {
    "weight": Key((int, float, str), REQUIRED, "Share of the rows, relative to the other weights. Exact if a string."),
    "layout": Key(dict, {}, "Keys of `layout` that differ for this source."),
    "sampler": Key(dict, {}, "Keys of `sampler` that differ: `order`, `seed`, `shuffle` and `epochs`."),
    "on_exhausted": Key(
        get_args(OnExhausted), "repeat", "As `sampler.on_exhausted`, for a source that is a mixture itself."
    ),
    "schedule": Key(list, [], "As `sampler.schedule`, weights only, for a source that is a mixture itself."),
}
"""Keys that a source of `corpus.mixture` takes besides those of CORPUS."""

SOURCE_SAMPLER = ("order", "seed", "shuffle", "epochs")
"""Keys of SAMPLER that a source of a mixture takes."""

SCHEDULE: Table = {
    "step": Key(int, REQUIRED, "First step of the change, 1 or more. Entries are in order of their steps."),
    "global_batch_size": Key(int, None, "Rows of a step from there on."),
    "global_batch_tokens": Key(int, None, "The same in tokens."),
    "weights": Key(dict, {}, "Weights of a mixture's sources from there on, by name; the others stay."),
}
"""Keys of an entry of `sampler.schedule`."""

TRANSFORM_OPTIONS: Mapping[str, Table] = {
    "ngram_filter": {
        "max_period": Key(int, 13, "Length in tokens of the longest n-grams that are counted."),
        "min_period": Key(int, 1, "Length in tokens of the shortest."),
        "max_count": Key(int, 32, "Repeats, one after the other, from which on a row takes no loss."),
        "count_padding": Key(bool, False, "Padding counts like any other token, as in OLMo-core's packed rows."),
    },
    "shift_targets": {},
    "trim_to_multiple": {
        "multiple": Key(int, 64, "Batches are cut to the shortest multiple of this that holds all their tokens."),
    },
    "drop_last_position": {},
}
"""Options of each transform."""

GPT_CONFIG: Table = {
    "dataset_dir": Key(str, REQUIRED, "`corpus.path`; the trainer takes it as an option."),
    "batch_size": Key(int, REQUIRED, "`sampler.global_batch_size`."),
    "block_size": Key(int, REQUIRED, "`layout.sequence_length` less one."),
    "use_loss_mask": Key(bool, False, "`corpus.use_loss_mask`."),
    "batch_sampling_mode": Key(("epoch", "random"), "epoch", "`sampler.order`: `episode` or `random`."),
    "epoch_seed": Key(int, 1337, "`sampler.seed`."),
    "epoch_shuffle": Key(bool, True, "`sampler.shuffle`."),
    "epoch_drop_last": Key(bool, True, "`sampler.last_batch`: `drop` or `run_on`."),
    "pad_token_id": Key(COUNT_OR_NONE, None, "`corpus.pad_token_id`."),
    "episode_min_tokens": Key(int, 2, "`layout.min_tokens`."),
}
"""Keys of a trainer's GPTConfig, and the keys that they mean."""

SECTIONS: Mapping[str, Table] = {
    "corpus": CORPUS,
    "layout": {**LAYOUT, **{name: key for options in LAYOUT_OPTIONS.values() for name, key in options.items()}},
    "sampler": SAMPLER,
}
"""The sections of a config."""
