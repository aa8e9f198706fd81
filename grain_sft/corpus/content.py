"""Content hashes: keys of everything that is derived from the bytes of a corpus.

A full hash reads every byte, about 1 GB/s a core, so this machine caches the hashes of files; see `_depends`.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grain_sft.errors import CorpusFileError
from grain_sft.storage import (
    FileStamp,
    Limits,
    Range,
    artifact,
    files,
    hashing,
    identify,
    inside,
    open_regular,
    remote_files,
    size_change,
)

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus

PREFIX = "content-sha256:"
"""Prefix of every content hash that is shown, so that none is mistaken for a fingerprint of a file's ends."""

FINGERPRINT_VERSION = 1

_VERSION = 1
_SETTLED = 2.0  # seconds without a write after which any later write changes a file's times
_REMEMBERED_FROM = 1 << 20  # bytes of all files; for fewer, a look into the cache takes as long as hashing
_AT_ONCE = 16 * hashing.BLOCK  # bytes of a remote file that are fetched together
_VERSIONS = ("generation", "ETag", "etag", "version_id")  # kinds of versions that change with an object's bytes

Read = Callable[[], list[str]]


class _ChangedError(Exception):
    """Files changed while they were hashed. The hashes are right for the bytes that were read."""


def hashes_of(stored: Sequence[FileStamp], read: Read | None = None, *, of: str = "bytes") -> list[str]:
    """Return the hash of each file's data, from the cache if it has them.

    Args:
      stored: Files.
      read: Function that reads all files and returns their hashes; None: `read_hashes`.
      of: Name of what `read` hashes, where that is not the bytes from `data_offset` on.
    """
    read = read or (lambda: read_hashes(stored))
    depends = _depends(stored, of)
    if depends is None:
        return read()
    hashes: list[str] = []

    def make() -> artifact.Arrays:
        hashes[:] = read()
        if _depends(stored, of) != depends:
            raise _ChangedError
        return {"sha256": np.array([list(bytes.fromhex(each)) for each in hashes], np.uint8)}

    try:
        # None: the cache that machines share
        folder = None if all(files.is_remote(file.path) for file in stored) else files.cache_dir()
        arrays = artifact.load_or_make("content", depends, make, folder)
    except _ChangedError:
        return hashes
    return [bytes(each).hex() for each in arrays["sha256"]]


def read_hashes(stored: Sequence[FileStamp]) -> list[str]:
    """Read the files, and return the hash of each one's bytes from `data_offset` on."""
    return [_read_remote(file) if files.is_remote(file.path) else _read_local(file) for file in stored]


def _read_local(file: FileStamp) -> str:
    with files.reading(file.path), inside(file.root), os.fdopen(open_regular(file.path), "rb", 0) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size != file.size:
            raise CorpusFileError(size_change(file, size))
        try:
            return hashing.joined(hashing.blocks_of([(opened.fileno(), file.data_offset, size)]))
        except EOFError as error:
            raise CorpusFileError(
                f"{file.path}: was cut short while it was read ({error}). Wait until it is complete."
            ) from error


def _read_remote(file: FileStamp) -> str:
    blocks: list[bytes] = []
    for start in range(file.data_offset, file.size, _AT_ONCE):
        ranges = [
            Range(file.path, at, min(at + hashing.BLOCK, file.size), version=file.version)
            for at in range(start, min(start + _AT_ONCE, file.size), hashing.BLOCK)
        ]
        blocks += map(hashing.of_block, remote_files.fetch_exactly(ranges))
    return hashing.joined(blocks)


def _depends(stored: Sequence[FileStamp], of: str) -> Mapping[str, Any] | None:
    """Return the key of cached hashes, which changes whenever one of the files is written to; None: cache no hashes.

    A local file is identified by its device, inode, size, and times of the last change of bytes and of metadata; an object in
    a bucket by its URL, size and version. Hashes are not cached if the files are small, if an object has no version, or if a
    file was written to in the last two seconds: another write could leave its times as they are.
    """
    if sum(file.size for file in stored) < _REMEMBERED_FROM:
        return None
    stamps: list[list[Any]] = []
    remote = [file for file in stored if files.is_remote(file.path)]
    now = time.time()
    try:
        versions = {file.path: file.version or "" for file in identify(remote, Limits.from_environment())}
        for file in stored:
            if files.is_remote(file.path):
                version = versions[file.path]
                if version.partition(" ")[0] not in _VERSIONS:
                    return None
                stamps.append([file.path, version, file.size, file.data_offset])
                continue
            status = os.stat(file.path)
            if now - max(status.st_mtime, status.st_ctime) < _SETTLED or status.st_size != file.size:
                return None
            times = status.st_mtime_ns, status.st_ctime_ns
            stamps.append([status.st_dev, status.st_ino, *times, file.size, file.data_offset])
    except OSError:
        return None  # reading the file says why
    return {"content": _VERSION, "of": of, "files": stamps}


def fingerprint_of(corpus: Corpus) -> str:
    """Return `Corpus.fingerprint`."""
    head = f"grain_sft corpus {FINGERPRINT_VERSION}\0{corpus.dtype.name}\0{corpus.eos_token_id}"
    digest = hashlib.sha256(head.encode())
    for shard in corpus.shards:
        digest.update(f"\0{shard.num_tokens}\0{shard.digest}".encode())
        if shard.loss is not None:
            digest.update(f"\0loss\0{shard.loss.kind}\0{shard.loss.digest}".encode())
        if shard.boundaries is not None:
            file = shard.boundaries
            digest.update(f"\0boundaries\0{file.kind}\0{file.continues}\0{file.size}\0{file.digest}".encode())
            if file.sequences is not None:
                first, stop = file.sequences
                digest.update(f"\0sequences\0{first}\0{stop}\0{shard.data_offset}".encode())
    if corpus.signed:
        digest.update(b"\0signed")
    if corpus.weights:
        digest.update("\0".join(["\0weights", *map(repr, corpus.weights)]).encode())
    if corpus.rows is not None:
        rows = corpus.rows
        parts = rows.sequence_length, rows.made_of, rows.positions_dtype, rows.segments_dtype, rows.most_segments
        digest.update("\0".join(["\0rows", *map(str, parts)]).encode())
    return f"sha256:{digest.hexdigest()}"


def content_of_boundaries(corpus: Corpus, hashes: list[str]) -> str:
    """Return the key of the documents of boundary files that have these hashes.

    The key also covers what decides whether a document continues in the next part: the last token of each shard, by the
    shard's digest, and the number of sources.
    """
    of_files = [
        [shard.num_tokens, shard.digest, file.kind, file.continues, found, *(file.sequences or ())]
        for shard, found in zip(corpus.shards, hashes, strict=True)
        if (file := shard.boundaries) is not None
    ]
    sources = None if corpus.sources_file is None else corpus.sources_file.size
    return _hash("boundaries", corpus.dtype.name, corpus.eos_token_id, sources, of_files)


def content_of_tokens(corpus: Corpus, hashes: list[str], bos_token_id: int | None) -> str:
    """Return the key of the documents that EOS tokens end in shards that have these hashes."""
    return _hash("eos", hash_of_tokens(corpus, hashes), corpus.eos_token_id, bos_token_id)


def hash_of_tokens(corpus: Corpus, hashes: list[str]) -> str:
    """Return the hash of every token of shards that have these hashes."""
    of_files = [[shard.num_tokens, found] for shard, found in zip(corpus.shards, hashes, strict=True)]
    return _hash("tokens", corpus.dtype.name, of_files)


def content_of_corpus(corpus: Corpus) -> str:
    """Return the hash of every byte of all files of tokens, loss and boundaries."""
    listed = [file for shard in corpus.shards for file in (shard, shard.loss, shard.boundaries) if file is not None]
    rest = iter(hashes_of(listed))
    of_files: list[Any] = []
    for shard in corpus.shards:
        of_files.append([shard.num_tokens, shard.row, next(rest)])
        if shard.loss is not None:
            of_files.append(["loss", shard.loss.kind, next(rest)])
        if shard.boundaries is not None:
            file = shard.boundaries
            of_files.append(["boundaries", file.kind, file.continues, next(rest), *(file.sequences or ())])
    weights = [corpus.weights] if corpus.weights else []
    return _hash("corpus", corpus.dtype.name, corpus.eos_token_id, of_files, *weights)


def hashed_of(corpus: Corpus) -> str:
    """Return the name of what a scan for EOS hashes, for the argument `of` of `hashes_of`."""
    ranges = [(shard.num_tokens, shard.boundaries.sequences) for shard in corpus.shards if shard.boundaries is not None]
    if any(sequences is not None for _, sequences in ranges):
        return f"tokens of ranges {[num_tokens for num_tokens, _ in ranges]}"
    return "bytes" if corpus.rows is None else "tokens in rows"


def _hash(*what: Any) -> str:
    text = json.dumps(["grain_sft content", 1, *what])
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()}"
