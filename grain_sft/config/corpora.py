"""The corpus of a config's section."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from grain_sft.corpus import Corpus, open_corpus
from grain_sft.errors import ConfigError


def make_corpus(keys: Mapping[str, Any], where: str) -> Corpus:
    """The corpus of a section."""
    keys = dict(keys)
    pads, uses_mask = "pad_token_id" in keys, keys.pop("use_loss_mask", True)
    pad = keys.pop("pad_token_id", None)
    corpus = open_corpus(keys.pop("path"), **keys)
    if pads:
        if pad is None and corpus.eos_token_id is None:
            raise ConfigError(
                f"{where}: corpus.pad_token_id is null, which is the id of the token that ends a document, and the corpus "
                "does not say that. Give corpus.eos_token_id, or the pad id itself."
            )
        corpus = dataclasses.replace(corpus, pad_token_id=corpus.eos_token_id if pad is None else pad)
    if not uses_mask:
        if corpus.rows is not None:
            raise ConfigError(f"{where}: corpus.use_loss_mask is false, but the rows of this corpus hold their masks.")
        shards = tuple(dataclasses.replace(shard, loss=None) for shard in corpus.shards)
        corpus = dataclasses.replace(corpus, shards=shards)
    return corpus
