"""Format index: the JSON that `Corpus.save` and MaxText's `olmo_grain` write, read without scanning the files again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from grain_sft.corpus.corpus import Corpus
from grain_sft.corpus.formats import Format
from grain_sft.corpus.formats.files import corpus_of_files, find_loss
from grain_sft.corpus.formats.metadata import DirectoryListing
from grain_sft.corpus.formats.mix import head_of
from grain_sft.corpus.formats.scanning import THREADS, ReadOptions, check_loss, check_mask_count, check_mask_order
from grain_sft.corpus.index_writer import INDEX_FORMAT, INDEX_VERSION, MAXTEXT_VERSION, maxtext_fingerprint
from grain_sft.corpus.loss import Count, LossKind, scan_loss
from grain_sft.corpus.shard import Shard, TokenDtype, token_dtype
from grain_sft.errors import CorpusError, CorpusFileError, GrainSftError
from grain_sft.storage import FileStamp, Limits, StampedFile, files, identify, size_change

_EXPECTED = (
    "Expected token files, or an index that `grain-sft index` wrote. If these are chats or texts, make a corpus of them "
    "with `grain-sft prepare`."
)
Remap = Callable[[str], str]


class Index(Format):
    """The corpus that an index lists. The name ends in .json, or the local file begins with a brace."""

    expected = "an index that `grain-sft index` or MaxText wrote"
    rank = 0
    any_path = lists_paths = True

    def detect(self, path: str, listing: DirectoryListing) -> str | None:
        if path.endswith(".json"):
            return path
        head = None if files.is_remote(path) else head_of(path)
        return path if head is not None and head.startswith(b"{") else None

    def read(self, found: str, options: ReadOptions, listing: DirectoryListing) -> Corpus:
        path = found
        try:
            data = json.loads(files.read_text(path))
        except (ValueError, RecursionError) as error:
            raise CorpusError(f"{path}: not JSON ({error}). {_EXPECTED}") from error
        if not isinstance(data, dict):
            raise CorpusError(f"{path}: expected a JSON object, found a {type(data).__name__}. {_EXPECTED}")
        try:
            if data.get("format") == INDEX_FORMAT:
                corpus = _read_own(path, data, options, listing)
            elif "format_version" in data and "files" in data:
                corpus = _read_maxtext(path, data, options, listing)
            else:
                raise CorpusError(
                    f"{path}: neither a grain_sft index nor MaxText's (no key 'format' or 'format_version'). "
                    "Build one with `grain-sft index`."
                )
        except GrainSftError:
            raise
        except (msgspec.ValidationError, OverflowError, ValueError) as error:
            raise CorpusError(f"{path}: {error}. The index is damaged: build it again.") from error
        if options.dtype is not None and options.dtype != corpus.dtype:
            raise CorpusError(
                f"{path}: the index is of {corpus.dtype.name} tokens, but dtype={options.dtype} was asked for."
            )
        eos = options.eos_token_id
        if eos is not None and corpus.eos_token_id not in (None, eos):
            raise CorpusError(f"{path}: the index has eos_token_id {corpus.eos_token_id}, but {eos} was asked for.")
        return dataclasses.replace(corpus, eos_token_id=corpus.eos_token_id if eos is None else eos)


class _OwnIndex(msgspec.Struct):
    """What `index_writer` writes; further keys are ignored."""

    version: int
    fingerprint: str
    dtype: TokenDtype
    eos_token_id: Count | None
    tokenizer: str | None
    shards: tuple[Shard, ...]
    tokenizer_sha256: str | None = None
    pad_token_id: Count | None = None
    sources: FileStamp | None = None
    source_names: tuple[str, ...] = ()
    use_loss_mask: bool | None = None


def _read_own(path: str, data: Any, options: ReadOptions, listing: DirectoryListing) -> Corpus:
    if data.get("version", INDEX_VERSION) != INDEX_VERSION:
        raise CorpusError(
            f"{path}: index version {data['version']!r}; this grain_sft reads version {INDEX_VERSION}. "
            "Build it again with `grain-sft index`."
        )
    index = msgspec.convert(data, _OwnIndex)

    def locate(file: Any) -> Any:
        """Return the file where it is now. The version is that of the file that was indexed, not of a copy."""
        found = _locate(path, file.path, options.remap)
        return dataclasses.replace(file, path=found, version=file.version if found == file.path else None, root=None)

    dtype = token_dtype(index.dtype, path)
    if (index.eos_token_id or 0) > np.iinfo(dtype).max:
        raise CorpusError(
            f"{path}: eos_token_id is {index.eos_token_id}, which {dtype.name} can't hold. Build it again."
        )
    corpus = Corpus(
        shards=index.shards,
        dtype=dtype,
        eos_token_id=index.eos_token_id,
        tokenizer=index.tokenizer,
        tokenizer_sha256=index.tokenizer_sha256,
        pad_token_id=index.pad_token_id,
        sources_file=index.sources,
        source_names=index.source_names,
    ).map_files(locate)
    _check_own(path, index.fingerprint, corpus)
    return _choose_loss(path, index.use_loss_mask, _pinned(corpus), options, listing)


def _pinned(corpus: Corpus) -> Corpus:
    """Return `corpus` with the versions of its remote files as they are now, where it has none."""
    unknown = {file.path: file for file in corpus.files() if files.is_remote(file.path) and file.version is None}
    if not unknown:
        return corpus
    limits = Limits.from_environment() if corpus.remote is None else corpus.remote.limits
    found = {file.path: file.version for file in identify(list(unknown.values()), limits)}
    return corpus.map_files(
        lambda file: dataclasses.replace(file, version=found[file.path]) if file.path in found else file
    )


def _check_own(path: str, fingerprint: str, corpus: Corpus) -> None:
    for number, shard in enumerate(corpus.shards):
        if shard.data_offset + shard.num_tokens * corpus.dtype.itemsize != shard.size:
            raise CorpusError(
                f"{path}: shard {number} ({shard.path}) has {shard.num_tokens} {corpus.dtype.name} tokens after "
                f"{shard.data_offset} bytes, which is not its size of {shard.size}. The index is damaged: build it again."
            )
        if shard.loss is not None and shard.loss.count != shard.num_tokens:
            raise CorpusError(
                f"{path}: shard {number} ({shard.path}) has {shard.num_tokens} tokens, but its loss file "
                f"{shard.loss.count} values. The index is damaged: build it again."
            )
    if not corpus.shards:
        raise CorpusError(f"{path}: the index lists no shard.")
    if fingerprint != corpus.fingerprint:
        raise CorpusError(
            f"{path}: the fingerprint in the index ({fingerprint}) is not that of its entries "
            f"({corpus.fingerprint}). It was edited or damaged: build it again with `grain-sft index`."
        )
    _check_sizes(path, [file for file in corpus.files() if not files.is_remote(file.path)])


def _check_sizes(path: str, local: Sequence[StampedFile]) -> None:
    """Check what one `stat` tells. A remote file is checked when it is first read."""

    def check(file: StampedFile) -> None:
        try:
            found = os.stat(file.path).st_size
        except OSError as error:
            raise CorpusFileError(
                f"{file.path}: can't be found ({error.strerror}), but the index {path} lists it. "
                "If the data moved, map the old path to the new one with path_remap."
            ) from error
        if found != file.size:
            raise CorpusFileError(f"{size_change(file, found)} Index: {path}.")

    for file in local[:1]:  # the usual mistake, a folder that moved, is answered at once
        check(file)
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(check, local[1:]))


def _locate(index: str, stated: str, remap: Remap) -> str:
    """Return the path of a file of `index`. Relative paths start at its folder; `remap` applies before or after that."""
    path = remap(stated)
    if files.is_remote(path) or os.path.isabs(path):
        return path
    found = files.join(files.parent(index), path)
    if not files.is_remote(index):
        found = os.path.normpath(found)
    return remap(found) if path == stated else found


def _choose_loss(
    path: str, stated: bool | None, corpus: Corpus, options: ReadOptions, listing: DirectoryListing
) -> Corpus:
    """Return the corpus with the loss files that `options` ask for: named ones, those of the index, or none.

    `stated` is the index's own `use_loss_mask`, which version 0.1.0 did not write, nor masks of listed files.
    """
    wanted = stated if options.use_loss_mask is None else options.use_loss_mask
    tokens = [shard.path for shard in corpus.shards]
    if options.masks is not None:
        check_mask_count(tokens, options.masks)
        masked = _with_losses(corpus, [(mask, "bool") for mask in options.masks])
        check_mask_order(tokens, options.masks)
        return masked
    if wanted is False:
        shards = tuple(dataclasses.replace(shard, loss=None) for shard in corpus.shards)
        return dataclasses.replace(corpus, shards=shards, ignores_loss=stated is False or corpus.has_loss)
    if corpus.has_loss:
        return corpus
    found = [find_loss(token_path, listing) for token_path in tokens]
    if not any(loss for loss, _ in found):
        return corpus
    if stated is False and all(loss for loss, _ in found):  # the index ignores them, the caller doesn't
        return _with_losses(corpus, found)
    at = next(number for number, (loss, _) in enumerate(found) if loss)
    raise CorpusError(
        f"{path}: lists {tokens[at]} without its loss mask {found[at][0]}, so all of its tokens would take loss. "
        "Build the index again, or give use_loss_mask=False to ignore the masks."
    )


def _with_losses(corpus: Corpus, losses: Sequence[tuple[str, LossKind]]) -> Corpus:
    """Return the corpus with these loss files, of these kinds."""

    def scan(shard: Shard, path: str, kind: LossKind) -> Shard:
        loss = scan_loss(path, kind)
        check_loss(shard, loss, corpus.dtype)
        return dataclasses.replace(shard, loss=loss)

    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        shards = tuple(pool.map(scan, corpus.shards, *zip(*losses, strict=True)))
    return dataclasses.replace(corpus, shards=shards, ignores_loss=False)


class _MaxTextFile(msgspec.Struct):
    path: str
    label: str
    n_tokens: Count


class _MaxTextIndex(msgspec.Struct):
    sequence_length: Count
    dtype: str
    tokenizer: str
    fingerprint: str
    files: list[_MaxTextFile]


def _read_maxtext(path: str, data: Mapping[str, Any], options: ReadOptions, listing: DirectoryListing) -> Corpus:
    """Return the corpus of MaxText's index, whose files are scanned and compared with it; it can't list sidecars."""
    if data["format_version"] != MAXTEXT_VERSION:
        raise CorpusError(
            f"{path}: MaxText index of format version {data['format_version']!r}; version {MAXTEXT_VERSION!r} can be read."
        )
    index = msgspec.convert(data, _MaxTextIndex)
    expected = maxtext_fingerprint(index.sequence_length, index.dtype, index.tokenizer, data["files"])
    if index.fingerprint != expected:
        raise CorpusError(
            f"{path}: the fingerprint in MaxText's index ({index.fingerprint}) is not that of its entries ({expected}). "
            "It was edited or damaged: build it again."
        )
    if not index.files:
        raise CorpusError(f"{path}: the index lists no file.")
    dtype: np.dtype[np.unsignedinteger] = token_dtype(index.dtype, path)
    sources = [(options.remap(entry.path), entry.label) for entry in index.files]
    corpus = corpus_of_files(sources, dataclasses.replace(options, dtype=dtype), listing)
    if len(corpus.shards) != len(index.files):
        raise CorpusError(f"{path}: lists files that hold no tokens, such as label masks. Build the index again.")
    for shard, entry in zip(corpus.shards, index.files, strict=True):
        if shard.num_tokens != entry.n_tokens:
            verb = "shrank" if shard.num_tokens < entry.n_tokens else "grew"
            raise CorpusFileError(
                f"{shard.path}: the file {verb} since it was indexed: {shard.num_tokens} tokens, but MaxText's index {path} "
                f"lists {entry.n_tokens}. Restore it, or build the index again."
            )
    return dataclasses.replace(corpus, tokenizer=index.tokenizer or corpus.tokenizer)
