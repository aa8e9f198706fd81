"""The corpus of a config's section."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from grain_sft.corpus import Corpus, check_tokenizer, open_corpus
from grain_sft.errors import ConfigError


def make_corpus(keys: Mapping[str, Any], where: str) -> Corpus:
    """Return the corpus of a section."""
    keys = dict(keys)
    pads = "pad_token_id" in keys
    pad = keys.pop("pad_token_id", None)
    corpus = open_corpus(keys.pop("path"), **keys)
    if "tokenizer" in keys:
        beside = os.path.join(os.path.dirname(where), keys["tokenizer"])
        if os.path.isfile(where) and os.path.exists(beside):  # a path that starts at the config's folder
            check_tokenizer(corpus, beside)
    if pads:
        if pad is None and corpus.eos_token_id is None:
            raise ConfigError(
                f"{where}: corpus.pad_token_id is null, which is the id of the token that ends a document, and the corpus "
                "does not say that. Give corpus.eos_token_id, or the pad id itself."
            )
        corpus = dataclasses.replace(corpus, pad_token_id=corpus.eos_token_id if pad is None else pad)
    return corpus
