"""What the commands that take any corpus share: the options of open_corpus."""

from __future__ import annotations

import argparse
from typing import Any

from grain_sft.cli.types import at_least, pair
from grain_sft.corpus.open import FORMATS
from grain_sft.corpus.shard import TOKEN_DTYPES


def add_corpus_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare how the files of a corpus are to be read."""
    group.add_argument("--format", choices=FORMATS, default="auto", help="(default: auto)")
    group.add_argument("--dtype", choices=TOKEN_DTYPES, help="of headerless arrays")
    group.add_argument("--eos-token-id", type=at_least(0), help="the token that ends a document")
    group.add_argument("--tokenizer", help="its name; fills {TOKENIZER} in a mix's paths")
    group.add_argument("--path-remap", action="append", type=pair, default=[], metavar="FROM=TO")


def corpus_options(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of it, as keyword arguments of open_corpus."""
    return {
        "format": options.format,
        "dtype": options.dtype,
        "eos_token_id": options.eos_token_id,
        "tokenizer": options.tokenizer,
        "path_remap": dict(options.path_remap),
    }
