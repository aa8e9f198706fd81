"""The index of MaxText's `olmo_grain` dataset type: maxtext/input_pipeline/olmo_data.py, format version "1"
(maxtext 0.2.5)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import logging

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Options, Tree, corpus_of_files
from grain_sft.corpus.shard import token_dtype
from grain_sft.errors import CorpusError, CorpusFileError
from grain_sft.storage import files

MAXTEXT_VERSION = "1"


def to_json(corpus: Corpus, sequence_length: int, tokenizer: str) -> dict[str, Any]:
    """MaxText's index of `corpus`."""
    if corpus.has_loss:
        raise CorpusError(
            "format='maxtext': MaxText's index has no place for loss masks: all tokens would take loss. Save the index as "
            "'grain_sft', or open the corpus with use_loss_mask=False."
        )
    entries: list[dict[str, Any]] = []
    rows = 0
    for shard in corpus.shards:
        if shard.data_offset:
            logging.warning(
                "%s has a .npy header, which MaxText 0.2.5 indexes but then reads as tokens: store it raw for MaxText.",
                shard.path,
            )
        count = shard.num_tokens // sequence_length
        entries.append(
            {
                "path": shard.path,
                "label": shard.label,
                "n_tokens": shard.num_tokens,
                "n_instances": count,
                "instance_offset": rows,
            }
        )
        rows += count
    return {
        "format_version": MAXTEXT_VERSION,
        "sequence_length": sequence_length,
        "dtype": corpus.dtype.name,
        "tokenizer": tokenizer,
        "total_instances": rows,
        "total_tokens": corpus.num_tokens,
        "fingerprint": maxtext_fingerprint(sequence_length, corpus.dtype.name, tokenizer, entries),
        "files": entries,
    }


def maxtext_fingerprint(sequence_length: int, dtype: str, tokenizer: str, entries: list[dict[str, Any]]) -> str:
    """MaxText's `compute_fingerprint`: SHA-256 over NUL-terminated fields, paths and token counts in order."""
    fields = [MAXTEXT_VERSION, str(sequence_length), dtype, tokenizer]
    for entry in entries:
        fields += [str(entry["path"]), str(entry["n_tokens"])]
    return "sha256:" + hashlib.sha256("".join(f"{field}\0" for field in fields).encode()).hexdigest()


def from_json(path: str, data: Mapping[str, Any], remap: Callable[[str], str], options: Options) -> Corpus:
    """Return the corpus of MaxText's index, its files scanned and compared with it.

    The index can't name sidecars, so they are looked for beside its files.
    """
    if data["format_version"] != MAXTEXT_VERSION:
        raise CorpusError(
            f"{path}: MaxText index of format version {data['format_version']!r}; version {MAXTEXT_VERSION!r} can be read."
        )
    entries = list(data["files"])
    tokenizer = checked_text(data["tokenizer"], path, "tokenizer")
    expected = maxtext_fingerprint(data["sequence_length"], data["dtype"], tokenizer, entries)
    if data["fingerprint"] != expected:
        raise CorpusError(
            f"{path}: the fingerprint in MaxText's index ({data['fingerprint']}) is not that of its entries ({expected}). "
            "It was edited or damaged: build it again."
        )
    if not entries:
        raise CorpusError(f"{path}: the index lists no file.")
    dtype: np.dtype[np.unsignedinteger] = token_dtype(data["dtype"], path)
    sources = [(files.absolute(remap(entry["path"])), checked_text(entry["label"], path, "label")) for entry in entries]
    corpus = corpus_of_files(sources, dataclasses.replace(options, dtype=dtype), Tree())
    if len(corpus.shards) != len(entries):
        raise CorpusError(f"{path}: lists files that hold no tokens, such as label masks. Build the index again.")
    for shard, entry in zip(corpus.shards, entries, strict=True):
        if shard.num_tokens != entry["n_tokens"]:
            verb = "shrank" if shard.num_tokens < entry["n_tokens"] else "grew"
            raise CorpusFileError(
                f"{shard.path}: the file {verb} since it was indexed: {shard.num_tokens} tokens, "
                f"MaxText's index {path} says {entry['n_tokens']}. Restore it, or build the index again."
            )
    return dataclasses.replace(corpus, tokenizer=tokenizer or corpus.tokenizer)


def checked_text(value: object, where: str, key: str) -> str:
    """`value`, found in the index `where` under `key`.

    Raises:
      CorpusError: it is no string.
    """
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {key} is {value!r}; expected a string. The index is damaged: build it again.")
    return value
