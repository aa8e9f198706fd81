"""What the commands that take any corpus share: the options of open_corpus."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from grain_sft.cli.types import at_least, pair
from grain_sft.corpus.open import FORMATS
from grain_sft.corpus.shard import TOKEN_DTYPES


def add_corpus_arguments(group: argparse._ArgumentGroup) -> None:
    """Declare how the files of a corpus are to be read."""
    group.add_argument("--format", choices=FORMATS, default="auto", help="(default: auto)")
    group.add_argument("--dtype", choices=TOKEN_DTYPES, help="of headerless arrays")
    group.add_argument("--eos-token-id", type=at_least(0), help="the token that ends a document")
    add_tokenizer_name(group)
    group.add_argument("--path-remap", action="append", type=pair, default=[], metavar="FROM=TO")
    add_mask_arguments(group)


def add_mask_arguments(group: argparse._ActionsContainer) -> None:
    """Declare which loss masks are used."""
    group.add_argument(
        "--label-mask-paths",
        nargs="+",
        metavar="FILE",
        help="label masks, one for each token file in order; files or globs (default: those beside the token files)",
    )
    group.add_argument(
        "--use-loss-mask",
        action=argparse.BooleanOptionalAction,
        help="refuse a corpus without loss masks, or ignore them (default: use them where they are)",
    )


def corpus_options(options: argparse.Namespace) -> dict[str, Any]:
    """What was given of it, as keyword arguments of open_corpus."""
    return {
        "format": options.format,
        "dtype": options.dtype,
        "eos_token_id": options.eos_token_id,
        "tokenizer": options.tokenizer_name,
        "path_remap": dict(options.path_remap),
        "label_mask_paths": options.label_mask_paths,
        "use_loss_mask": options.use_loss_mask,
    }


def add_tokenizer_name(group: argparse._ActionsContainer) -> None:
    """Declare `--tokenizer-name`, and `--tokenizer`, its spelling in version 0.1.0."""
    group.add_argument(
        "--tokenizer-name",
        metavar="NAME",
        help="fills {TOKENIZER} in a mix's paths; a corpus that was made with another tokenizer, by name or file, is refused",
    )
    group.add_argument("--tokenizer", action=_OldName, dest="tokenizer_name", help=argparse.SUPPRESS)


class _OldName(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: str | Sequence[Any] | None, option: object = None
    ) -> None:
        print(
            f"warning: --tokenizer {values} is taken as --tokenizer-name {values}. In other commands --tokenizer is a file "
            "or directory that is opened. Write --tokenizer-name.",
            file=sys.stderr,
        )
        setattr(namespace, self.dest, values)
