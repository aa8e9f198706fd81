"""Hashes of all content that decides where documents are, or what a corpus holds: what is derived from it is found by
them."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from grain_sft.corpus.boundaries import BoundaryFile
from grain_sft.corpus.content import PREFIX

if TYPE_CHECKING:
    from grain_sft.corpus.corpus import Corpus


def content_of_boundaries(corpus: Corpus, hashes: list[str]) -> str:
    """Of the documents of boundary files with these hashes. The last token of each shard, which is among its ends, and the
    number of sources decide whether a document goes on in the next part."""
    eos = None if corpus.eos_token_id is None else int(corpus.eos_token_id)
    of_files: list[Any] = []
    for shard, found in zip(corpus.shards, hashes, strict=True):
        file: BoundaryFile | None = shard.boundaries
        assert file is not None
        of_files.append([shard.num_tokens, shard.digest, file.kind, file.continues, found])
    sources = None if corpus.sources_file is None else corpus.sources_file.size
    return _hash(["boundaries", corpus.dtype.name, eos, sources, of_files])


def content_of_tokens(corpus: Corpus, hashes: list[str], bos_token_id: int | None) -> str:
    """Of the documents that EOS tokens end in shards with these hashes."""
    assert corpus.eos_token_id is not None
    return _hash(["eos", hash_of_tokens(corpus, hashes), int(corpus.eos_token_id), bos_token_id])


def hash_of_tokens(corpus: Corpus, hashes: list[str]) -> str:
    """Of every token of shards with these hashes."""
    of_files = [[shard.num_tokens, found] for shard, found in zip(corpus.shards, hashes, strict=True)]
    return _hash(["tokens", corpus.dtype.name, of_files])


def content_of_corpus(corpus: Corpus, hashes: list[str]) -> str:
    """Of a corpus whose shards, each followed by its files of loss and of boundaries, have these hashes."""
    rest = iter(hashes)
    of_files: list[Any] = []
    for shard in corpus.shards:
        of_files.append([shard.num_tokens, shard.row, next(rest)])
        if shard.loss is not None:
            of_files.append(["loss", shard.loss.kind, next(rest)])
        if shard.boundaries is not None:
            of_files.append(["boundaries", shard.boundaries.kind, shard.boundaries.continues, next(rest)])
    eos = None if corpus.eos_token_id is None else int(corpus.eos_token_id)
    return _hash(["corpus", corpus.dtype.name, eos, of_files])


def hashed_of(corpus: Corpus) -> str:
    """What a scan hashes of each shard; see `content.hashes_of`."""
    return "bytes" if all(shard.row is None for shard in corpus.shards) else "tokens in rows"


def _hash(what: Any) -> str:
    text = json.dumps(["grain_sft content", 1, *what])
    return f"{PREFIX}{hashlib.sha256(text.encode()).hexdigest()}"
