"""Content hashes: hashes of every byte of files and of corpora. The hashes of files are cached."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from grain_sft.corpus.data import CorpusData
from grain_sft.storage import FileStamp, artifact, files, hashing, identify

PREFIX = "content-sha256:"
"""Prefix of every content hash."""

_VERSION = 1  # of the cached hashes
_SETTLED = 2.0  # seconds; see `_cache_key`
_CACHED_FROM = 1 << 20  # bytes of all files together; hashing fewer bytes takes no longer than opening the cache
_VERSIONS = ("generation", "ETag", "etag", "version_id")  # kinds of versions that change if the bytes of a file change


class _ChangedError(Exception):
    """Files changed while they were hashed, so their hashes must not be cached."""


def hashes_of(stamps: Sequence[FileStamp], read: Callable[[], list[str]] | None = None, of: str = "bytes") -> list[str]:
    """Return the hashes of the files' data, from the cache if possible.

    Args:
      stamps: Files to hash.
      read: Function that reads all files and returns their hashes. None hashes each file with `hashing.of_file`.
      of: Name of what `read` hashes, a part of the cache's key. "bytes" means every byte of each file from `data_offset` on.
    """
    read = read or (lambda: list(map(hashing.of_file, stamps)))
    key = _cache_key(stamps, of)
    if key is None:
        return read()
    hashes: list[str] = []  # what `make` computes, for the case that it raises `_ChangedError`

    def make() -> artifact.Arrays:
        hashes[:] = read()
        if _cache_key(stamps, of) != key:
            raise _ChangedError
        return {"sha256": np.array([list(bytes.fromhex(text)) for text in hashes], np.uint8)}

    # None means the cache that machines may share. Keys of local files hold inodes, which differ between machines.
    folder = None if all(files.is_remote(file.path) for file in stamps) else files.cache_dir()
    try:
        arrays = artifact.load_or_make("content", key, make, folder)
    except _ChangedError:
        return hashes
    return [bytes(row).hex() for row in arrays["sha256"]]


def _cache_key(stamps: Sequence[FileStamp], of: str) -> Mapping[str, Any] | None:
    """Return the key of the cached hashes of files. The key changes whenever a process writes to one of the files.

    Return None if the files are small, a remote file has no version, or a local file has another size than its stamp or was
    written to in the last two seconds. A second write in this time might not change the file's times.
    """
    if sum(file.size for file in stamps) < _CACHED_FROM:
        return None
    facts: list[list[Any]] = []
    remote = [file for file in stamps if files.is_remote(file.path)]
    now = time.time()
    try:
        versions = {file.path: file.version or "" for file in identify(remote)}  # asks the store if a stamp has no version
        for file in stamps:
            if files.is_remote(file.path):
                version = versions[file.path]
                if version.partition(" ")[0] not in _VERSIONS:  # a version is a kind and a value: "generation 1712"
                    return None
                facts.append([file.path, version, file.size, file.data_offset])
                continue
            status = os.stat(file.path)
            if now - max(status.st_mtime, status.st_ctime) < _SETTLED or status.st_size != file.size:
                return None
            identity = [status.st_dev, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
            facts.append([*identity, file.size, file.data_offset])
    except OSError:
        return None  # the caller reads the file next, which raises an error that gives the reason
    return {"content": _VERSION, "of": of, "files": facts}


def content_of_boundaries(corpus: CorpusData, hashes: list[str]) -> str:
    """Return a hash of all that decides where documents begin and end. `hashes` are the hashes of the boundary files."""
    facts = []
    for shard, file_hash in zip(corpus.shards, hashes, strict=True):
        if (file := shard.boundaries) is not None:
            facts.append([shard.num_tokens, shard.digest, file.kind, file.continues, file_hash, *(file.sequences or ())])
    # Whether a document continues in the next shard may depend on the last token of the shard, which its digest covers, and on
    # the number of documents, which the size of `sources_file` states.
    sources_size = None if corpus.sources_file is None else corpus.sources_file.size
    return _hash("boundaries", corpus.dtype.name, corpus.eos_token_id, sources_size, facts)


def content_of_tokens(corpus: CorpusData, hashes: list[str], bos_token_id: int | None) -> str:
    """Return a hash of all that decides which EOS tokens end documents. `hashes` are as in `hash_of_tokens`."""
    return _hash("eos", hash_of_tokens(corpus, hashes), corpus.eos_token_id, bos_token_id)


def hash_of_tokens(corpus: CorpusData, hashes: list[str]) -> str:
    """Return a hash of every token of the corpus. `hashes` are the hashes of each shard's tokens."""
    facts = [[shard.num_tokens, tokens_hash] for shard, tokens_hash in zip(corpus.shards, hashes, strict=True)]
    return _hash("tokens", corpus.dtype.name, facts)


def content_of_corpus(corpus: CorpusData) -> str:
    """Return a hash of all files of tokens, loss and boundaries, and of the facts that decide how they are read."""
    hashed = [file for shard in corpus.shards for file in (shard, shard.loss, shard.boundaries) if file is not None]
    hashes = iter(hashes_of(hashed))  # the loop below takes the hashes in the order of `hashed`
    facts: list[Any] = []
    for shard in corpus.shards:
        facts.append([shard.num_tokens, shard.row, next(hashes)])
        if shard.loss is not None:
            facts.append(["loss", shard.loss.kind, next(hashes)])
        if (file := shard.boundaries) is not None:
            facts.append(["boundaries", file.kind, file.continues, next(hashes), *(file.sequences or ())])
    return _hash("corpus", corpus.dtype.name, corpus.eos_token_id, facts, *([corpus.weights] if corpus.weights else []))


def name_of_scan(corpus: CorpusData) -> str:
    """Return the argument `of` of `hashes_of` for a scan that hashes the tokens of each shard.

    The name is "bytes" only if each shard is a whole file: the hash of a part of a file must not be cached as the hash of the
    whole file.
    """
    has_ranges = any(shard.boundaries and shard.boundaries.sequences for shard in corpus.shards)
    is_whole = corpus.rows is None and not has_ranges
    return "bytes" if is_whole else f"tokens of shards of {[shard.num_tokens for shard in corpus.shards]}"


def _hash(*facts: Any) -> str:
    text = json.dumps(["grain_sft content", 1, *facts])  # 1 is the version of these hashes, not that of the cache
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()}"
