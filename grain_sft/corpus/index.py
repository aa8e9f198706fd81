"""Saved indexes: this project's JSON, and the one of MaxText's `olmo_grain` dataset type.

MaxText's: maxtext/input_pipeline/olmo_data.py, format version "1" (maxtext 0.2.5).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import logging

from grain_sft import files
from grain_sft.arguments import as_integer
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.scan import THREADS, scan_shards
from grain_sft.corpus.shard import Shard, token_dtype
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError

FORMAT = "grain_sft index"
VERSION = 1
MAXTEXT_VERSION = "1"

Remap = Callable[[str], str]


def save(
    corpus: Corpus,
    path: str | os.PathLike[str],
    *,
    format: str,
    sequence_length: int | None,
    tokenizer: str | None,
) -> None:
    """Write `corpus` as JSON; see `Corpus.save`."""
    if format == "grain_sft":
        data = _to_json(corpus, os.path.dirname(os.path.abspath(os.fspath(path))))
    elif format == "maxtext":
        if sequence_length is None:
            raise CorpusError(
                "format='maxtext': MaxText's index is made for one sequence length; give sequence_length."
            )
        sequence_length = as_integer("sequence_length", sequence_length, 1, CorpusError)
        data = _to_maxtext_json(corpus, sequence_length, tokenizer or corpus.tokenizer or "")
    else:
        raise CorpusError(f"format={format!r}: an index is written as 'grain_sft' or 'maxtext'.")
    with files.atomic_write(path) as file:
        json.dump(data, file, indent=2)
        file.write("\n")


def load(
    path: str,
    text: str,
    *,
    dtype: object,
    eos_token_id: int | None,
    tokenizer: str | None,
    remap: Remap,
) -> Corpus:
    """The corpus of the index `text`, read from `path`; files that are missing or of another size are an error."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not JSON ({error}). An index is made by `grain-sft index`.") from error
    if not isinstance(data, dict):
        raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}.")
    try:
        if data.get("format") == FORMAT:
            corpus = _from_json(path, data, remap)
        elif "format_version" in data and "files" in data:
            corpus = _from_maxtext_json(path, data, remap)
        else:
            raise CorpusError(
                f"{path}: neither a grain_sft index nor MaxText's (no key 'format' or 'format_version'). "
                "Build one with `grain-sft index`."
            )
    except GrainSftError:
        raise
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise CorpusError(f"{path}: the index lacks or garbles a field ({error!r}). Build it again.") from error
    if dtype is not None and token_dtype(dtype, path) != corpus.dtype:
        raise CorpusError(f"{path}: the index is of {corpus.dtype.name} tokens, but dtype={dtype} was asked for.")
    if eos_token_id is not None and corpus.eos_token_id not in (None, eos_token_id):
        raise CorpusError(
            f"{path}: the index has eos_token_id {corpus.eos_token_id}, but {eos_token_id} was asked for."
        )
    return dataclasses.replace(
        corpus,
        eos_token_id=corpus.eos_token_id if eos_token_id is None else eos_token_id,
        tokenizer=tokenizer or corpus.tokenizer,
    )


def _to_json(corpus: Corpus, folder: str) -> dict[str, Any]:
    def stored(path: str) -> str:
        if files.is_remote(path):
            return path
        absolute = os.path.abspath(path)
        return os.path.relpath(absolute, folder) if absolute.startswith(folder.rstrip("/") + "/") else absolute

    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "dtype": corpus.dtype.name,
        "eos_token_id": None if corpus.eos_token_id is None else int(corpus.eos_token_id),
        "tokenizer": corpus.tokenizer,
        "num_tokens": corpus.num_tokens,
        "shards": [{**dataclasses.asdict(shard), "path": stored(shard.path)} for shard in corpus.shards],
    }


def _from_json(path: str, data: Mapping[str, Any], remap: Remap) -> Corpus:
    if data["version"] != VERSION:
        raise CorpusError(
            f"{path}: index version {data['version']!r}; this grain_sft reads version {VERSION}. "
            "Build it again with `grain-sft index`."
        )
    shards = []
    for number, entry in enumerate(data["shards"]):
        where = f"{path}: shard {number}"
        shard = Shard(
            path=_locate(path, _text(entry["path"], where, "path"), remap),
            num_tokens=_count(entry["num_tokens"], where, "num_tokens"),
            size=_count(entry["size"], where, "size"),
            data_offset=_count(entry["data_offset"], where, "data_offset"),
            label=_text(entry["label"], where, "label"),
            digest=_text(entry["digest"], where, "digest"),
        )
        shards.append(shard)
    dtype: np.dtype[np.unsignedinteger] = token_dtype(_text(data["dtype"], path, "dtype"), path)
    eos = data["eos_token_id"]
    corpus = Corpus(
        shards=tuple(shards),
        dtype=dtype,
        eos_token_id=None if eos is None else _count(eos, path, "eos_token_id", np.iinfo(dtype).max),
        tokenizer=None if data["tokenizer"] is None else _text(data["tokenizer"], path, "tokenizer"),
    )
    for number, shard in enumerate(shards):
        if shard.data_offset + shard.num_tokens * corpus.dtype.itemsize != shard.size:
            raise CorpusError(
                f"{path}: shard {number} ({shard.path}) says {shard.num_tokens} {corpus.dtype.name} tokens after "
                f"{shard.data_offset} bytes, which is not its size of {shard.size}. The index is damaged: build it again."
            )
    if not shards:
        raise CorpusError(f"{path}: the index lists no shard.")
    if data["fingerprint"] != corpus.fingerprint:
        raise CorpusError(
            f"{path}: the fingerprint in the index ({data['fingerprint']}) is not that of its entries "
            f"({corpus.fingerprint}). It was edited or damaged: build it again with `grain-sft index`."
        )
    _check_sizes(path, shards)
    return corpus


def _locate(index: str, stored: str, remap: Remap) -> str:
    """Where the shard `stored` of `index` is: relative paths start at the index's folder, and may be remapped as they
    are stored or as they then are."""
    path = remap(stored)
    if files.is_remote(path) or os.path.isabs(path):
        return path
    if files.is_remote(index):
        found = f"{index.rsplit('/', 1)[0]}/{path}"
    else:
        found = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(index)), path))
    return remap(found) if path == stored else found


def _check_sizes(path: str, shards: list[Shard]) -> None:
    """Local files only: what one `stat` can tell. A remote file is checked when it is first read."""

    def check(shard: Shard) -> None:
        try:
            found = os.stat(shard.path).st_size
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be found ({error.strerror}), but the index {path} lists it. "
                "If the data moved, map the old place to the new with path_remap."
            ) from error
        if found != shard.size:
            raise CorpusFileError(f"{size_change(shard, found)} Index: {path}.")

    local = [shard for shard in shards if not files.is_remote(shard.path)]
    for shard in local[:1]:  # the usual mistake, a folder that moved, is answered at once
        check(shard)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, local[1:]))


def size_change(shard: Shard, found: int) -> str:
    """The sentence for a shard whose file has another size than when it was indexed."""
    verb = "shrank" if found < shard.size else "grew"
    return (
        f"{shard.path}: the file {verb} since it was indexed: {found} bytes, expected {shard.size}. "
        "Restore it, or index the corpus again (and then don't resume an old run on it: its rows move)."
    )


def _to_maxtext_json(corpus: Corpus, sequence_length: int, tokenizer: str) -> dict[str, Any]:
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


def _from_maxtext_json(path: str, data: Mapping[str, Any], remap: Remap) -> Corpus:
    if data["format_version"] != MAXTEXT_VERSION:
        raise CorpusError(
            f"{path}: MaxText index of format version {data['format_version']!r}; version {MAXTEXT_VERSION!r} can be read."
        )
    entries = list(data["files"])
    tokenizer = _text(data["tokenizer"], path, "tokenizer")
    expected = maxtext_fingerprint(data["sequence_length"], data["dtype"], tokenizer, entries)
    if data["fingerprint"] != expected:
        raise CorpusError(
            f"{path}: the fingerprint in MaxText's index ({data['fingerprint']}) is not that of its entries ({expected}). "
            "It was edited or damaged: build it again."
        )
    if not entries:
        raise CorpusError(f"{path}: the index lists no file.")
    dtype: np.dtype[np.unsignedinteger] = token_dtype(data["dtype"], path)
    sources = [(files.absolute(remap(entry["path"])), _text(entry["label"], path, "label")) for entry in entries]
    corpus = scan_shards(sources, dtype, tokenizer=tokenizer)
    for shard, entry in zip(corpus.shards, entries, strict=True):
        if shard.num_tokens != entry["n_tokens"]:
            verb = "shrank" if shard.num_tokens < entry["n_tokens"] else "grew"
            raise CorpusFileError(
                f"{shard.path}: the file {verb} since it was indexed: {shard.num_tokens} tokens, "
                f"MaxText's index {path} says {entry['n_tokens']}. Restore it, or build the index again."
            )
    return corpus


def _text(value: object, where: str, key: str) -> str:
    if not isinstance(value, str):
        raise CorpusError(f"{where}: {key} is {value!r}; expected a string. The index is damaged: build it again.")
    return value


def _count(value: object, where: str, key: str, highest: int = (1 << 63) - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        raise CorpusError(f"{where}: {key} is {value!r}; expected a count. The index is damaged: build it again.")
    return value


def is_index(path: str) -> bool:
    """Whether a local or remote path is named as an index is."""
    return Path(path).suffix == ".json"
