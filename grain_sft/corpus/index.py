"""Saved indexes: this project's JSON; MaxText's is in maxtext_index.py."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from grain_sft.arguments import as_integer
from grain_sft.corpus import maxtext_index
from grain_sft.corpus.boundaries import READERS, BoundaryFile
from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Options
from grain_sft.corpus.indexed_loss import indexed_loss
from grain_sft.corpus.loss import KINDS, LossFile
from grain_sft.corpus.maxtext_index import checked_text
from grain_sft.corpus.scan import THREADS
from grain_sft.corpus.shard import Shard, token_dtype
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError
from grain_sft.storage import FileStamp, Limits, StampedFile, files, identify, size_change

FORMAT = "grain_sft index"
_EXPECTED = (
    "Expected token files, or an index that `grain-sft index` wrote. If these are chats or texts, make a corpus of them "
    "with `grain-sft prepare`."
)
VERSION = 1


def save(
    corpus: Corpus,
    path: str | os.PathLike[str],
    *,
    format: str,
    sequence_length: int | None,
    tokenizer: str | None,
) -> None:
    """Write `corpus` as JSON; see `Corpus.save`."""
    path = files.normalize(path)
    if corpus.rows is not None:
        raise CorpusError(
            f"{path}: rows that `grain-sft pack --materialize` wrote need no index: their folder "
            f"{os.path.dirname(corpus.shards[0].path)} opens as fast."
        )
    if format == "grain_sft":
        data = _to_json(corpus, os.path.dirname(os.path.abspath(path)))
    elif format == "maxtext":
        if sequence_length is None:
            raise CorpusError(
                "format='maxtext': MaxText's index is made for one sequence length; give sequence_length."
            )
        sequence_length = as_integer("sequence_length", sequence_length, 1, CorpusError)
        data = maxtext_index.to_json(corpus, sequence_length, tokenizer or corpus.tokenizer or "")
    else:
        raise CorpusError(f"format={format!r}: an index is written as 'grain_sft' or 'maxtext'.")
    with files.atomic_write(path) as file:
        json.dump(data, file, indent=2)
        file.write("\n")


def load(path: str, text: str, options: Options, remap: Callable[[str], str]) -> Corpus:
    """Return the corpus of the index `text`, read from `path`.

    Raises:
      CorpusFileError: a file is missing or of another size.
      CorpusError: a malformed index, or one of other ids or dtypes than `options` ask for.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"{path}: not JSON ({error}). {_EXPECTED}") from error
    if not isinstance(data, dict):
        raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}. {_EXPECTED}")
    try:
        if data.get("format") == FORMAT:
            corpus = indexed_loss(path, data, _from_json(path, data, remap), options)
        elif "format_version" in data and "files" in data:
            corpus = maxtext_index.from_json(path, data, remap, options)
        else:
            raise CorpusError(
                f"{path}: neither a grain_sft index nor MaxText's (no key 'format' or 'format_version'). "
                "Build one with `grain-sft index`."
            )
    except GrainSftError:
        raise
    except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
        raise CorpusError(f"{path}: the index lacks or garbles a field ({error!r}). Build it again.") from error
    if options.dtype is not None and options.dtype != corpus.dtype:
        raise CorpusError(
            f"{path}: the index is of {corpus.dtype.name} tokens, but dtype={options.dtype} was asked for."
        )
    eos = options.eos_token_id
    if eos is not None and corpus.eos_token_id not in (None, eos):
        raise CorpusError(f"{path}: the index has eos_token_id {corpus.eos_token_id}, but {eos} was asked for.")
    return dataclasses.replace(corpus, eos_token_id=corpus.eos_token_id if eos is None else eos)


def _to_json(corpus: Corpus, folder: str) -> dict[str, Any]:
    def stored(path: str) -> str:
        if files.is_remote(path):
            return path
        absolute = os.path.abspath(path)
        return os.path.relpath(absolute, folder) if absolute.startswith(folder.rstrip("/") + "/") else absolute

    def entry(file: Shard | LossFile | BoundaryFile | FileStamp) -> dict[str, Any]:
        fields = {key: value for key, value in vars(file).items() if value is not None and key != "root"}
        for key in ("loss", "boundaries"):
            if key in fields:
                fields[key] = entry(fields[key])
        return {**fields, "path": stored(file.path)}

    beside = {
        "tokenizer_sha256": corpus.tokenizer_sha256,
        "pad_token_id": corpus.pad_token_id,
        "sources": None if corpus.sources_file is None else entry(corpus.sources_file),
        "source_names": list(corpus.source_names) or None,
    }
    return {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": corpus.fingerprint,
        "dtype": corpus.dtype.name,
        "eos_token_id": None if corpus.eos_token_id is None else int(corpus.eos_token_id),
        "tokenizer": corpus.tokenizer,
        "num_tokens": corpus.num_tokens,
        "use_loss_mask": True if corpus.has_loss else False if corpus.ignores_loss else None,
        **{key: value for key, value in beside.items() if value is not None},
        "shards": [entry(shard) for shard in corpus.shards],
    }


def _from_json(path: str, data: Mapping[str, Any], remap: Callable[[str], str]) -> Corpus:
    if data["version"] != VERSION:
        raise CorpusError(
            f"{path}: index version {data['version']!r}; this grain_sft reads version {VERSION}. "
            "Build it again with `grain-sft index`."
        )
    shards = [_shard(path, f"{path}: shard {number}", entry, remap) for number, entry in enumerate(data["shards"])]
    dtype: np.dtype[np.unsignedinteger] = token_dtype(checked_text(data["dtype"], path, "dtype"), path)
    eos, pad, sources = data["eos_token_id"], data.get("pad_token_id"), data.get("sources")
    corpus = Corpus(
        shards=tuple(shards),
        dtype=dtype,
        eos_token_id=None if eos is None else _count(eos, path, "eos_token_id", np.iinfo(dtype).max),
        tokenizer=None if data["tokenizer"] is None else checked_text(data["tokenizer"], path, "tokenizer"),
        tokenizer_sha256=_optional_text(data.get("tokenizer_sha256"), path, "tokenizer_sha256"),
        pad_token_id=None if pad is None else _count(pad, path, "pad_token_id"),
        sources_file=None if sources is None else FileStamp(**_stored(path, f"{path}: sources", sources, remap)),
        source_names=tuple(checked_text(name, path, "source_names") for name in data.get("source_names", [])),
    )
    for number, shard in enumerate(shards):
        if shard.data_offset + shard.num_tokens * corpus.dtype.itemsize != shard.size:
            raise CorpusError(
                f"{path}: shard {number} ({shard.path}) says {shard.num_tokens} {corpus.dtype.name} tokens after "
                f"{shard.data_offset} bytes, which is not its size of {shard.size}. The index is damaged: build it again."
            )
        if shard.loss is not None and shard.loss.count != shard.num_tokens:
            raise CorpusError(
                f"{path}: shard {number} ({shard.path}) has {shard.num_tokens} tokens, but its loss file "
                f"{shard.loss.count} values. The index is damaged: build it again."
            )
    if not shards:
        raise CorpusError(f"{path}: the index lists no shard.")
    if data["fingerprint"] != corpus.fingerprint:
        raise CorpusError(
            f"{path}: the fingerprint in the index ({data['fingerprint']}) is not that of its entries "
            f"({corpus.fingerprint}). It was edited or damaged: build it again with `grain-sft index`."
        )
    _check_sizes(path, corpus)
    return _pinned(corpus)


def _pinned(corpus: Corpus) -> Corpus:
    """Return `corpus` with the versions of its remote files as they are now, where it has none.

    Raises:
      CorpusFileError: A file is missing, unreadable, or of another size than was indexed.
    """
    unknown = {file.path: file for file in corpus.files() if files.is_remote(file.path) and file.version is None}
    if not unknown:
        return corpus
    limits = Limits.from_environment() if corpus.remote is None else corpus.remote.limits
    found = {file.path: file.version for file in identify(list(unknown.values()), limits)}

    def pin(file: Any) -> Any:
        return file if file is None or file.path not in found else dataclasses.replace(file, version=found[file.path])

    shards = tuple(
        dataclasses.replace(pin(shard), loss=pin(shard.loss), boundaries=pin(shard.boundaries))
        for shard in corpus.shards
    )
    return dataclasses.replace(corpus, shards=shards, sources_file=pin(corpus.sources_file))


def _shard(index: str, where: str, entry: Mapping[str, Any], remap: Callable[[str], str]) -> Shard:
    loss, boundaries = entry.get("loss"), entry.get("boundaries")
    return Shard(
        **_stored(index, where, entry, remap),
        num_tokens=_count(entry["num_tokens"], where, "num_tokens"),
        label=checked_text(entry["label"], where, "label"),
        loss=None if loss is None else LossFile(kind=_kind(loss, KINDS, where), **_stored(index, where, loss, remap)),
        boundaries=None if boundaries is None else _boundaries(index, f"{where}: boundaries", boundaries, remap),
    )


def _boundaries(index: str, where: str, entry: Mapping[str, Any], remap: Callable[[str], str]) -> BoundaryFile:
    fields = _stored(index, where, {"data_offset": 0, **entry}, remap)
    del fields["data_offset"]
    continues = entry.get("continues")
    if continues is not None and not isinstance(continues, bool):
        raise CorpusError(f"{where}: continues is {continues!r}; expected true or false. Build the index again.")
    return BoundaryFile(kind=_kind(entry, READERS, where), continues=continues, **fields)


def _kind(entry: Mapping[str, Any], known: Mapping[str, object], where: str) -> str:
    kind = checked_text(entry["kind"], where, "kind")
    if kind not in known:
        raise CorpusError(f"{where}: kind is {kind!r}; expected one of {', '.join(known)}. Build the index again.")
    return kind


def _stored(index: str, where: str, entry: Mapping[str, Any], remap: Callable[[str], str]) -> dict[str, Any]:
    """The fields that every file has. The version is that of the file where it was indexed, not of a copy elsewhere."""
    stated = checked_text(entry["path"], where, "path")
    path = _locate(index, stated, remap)
    return {
        "path": path,
        "version": _optional_text(entry.get("version"), where, "version") if path == stated else None,
        "size": _count(entry["size"], where, "size"),
        "data_offset": _count(entry["data_offset"], where, "data_offset"),
        "digest": checked_text(entry["digest"], where, "digest"),
    }


def _locate(index: str, stored: str, remap: Callable[[str], str]) -> str:
    """Where the file `stored` of `index` is: relative paths start at the index's folder, and may be remapped as they
    are stored or as they then are."""
    path = remap(stored)
    if files.is_remote(path) or os.path.isabs(path):
        return path
    found = files.join(files.parent(index), path)
    if not files.is_remote(index):
        found = os.path.normpath(found)
    return remap(found) if path == stored else found


def _check_sizes(path: str, corpus: Corpus) -> None:
    """Local files only: what one `stat` can tell. A remote file is checked when it is first read."""

    def check(shard: StampedFile) -> None:
        try:
            found = os.stat(shard.path).st_size
        except OSError as error:
            raise CorpusFileError(
                f"{shard.path}: can't be found ({error.strerror}), but the index {path} lists it. "
                "If the data moved, map the old place to the new with path_remap."
            ) from error
        if found != shard.size:
            raise CorpusFileError(f"{size_change(shard, found)} Index: {path}.")

    local = [file for file in corpus.files() if not files.is_remote(file.path)]
    for shard in local[:1]:  # the usual mistake, a folder that moved, is answered at once
        check(shard)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, local[1:]))


def _optional_text(value: object, where: str, key: str) -> str | None:
    return None if value is None else checked_text(value, where, key)


def _count(value: object, where: str, key: str, highest: int = (1 << 63) - 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= highest:
        raise CorpusError(f"{where}: {key} is {value!r}; expected a count. The index is damaged: build it again.")
    return value


def is_index(path: str) -> bool:
    """Whether a local or remote path is named as an index is."""
    return Path(path).suffix == ".json"
