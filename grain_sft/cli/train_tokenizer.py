"""`grain-sft train-tokenizer`: a SentencePiece model of conversations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator

from grain_sft.cli.output import check_output
from grain_sft.cli.progress import elapsed
from grain_sft.cli.types import add_schema_argument, at_least
from grain_sft.prepare.training import CHAT_TOKENS, MIN_VOCAB, conversation_lines, train_tokenizer
from grain_sft.storage import files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files of conversations or texts, as for prepare")
    parser.add_argument("-o", "--output", required=True, help="the model's file")
    parser.add_argument("--vocab-size", type=at_least(MIN_VOCAB), default=16_000, help="(default: 16,000)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="(default: bpe)")
    parser.add_argument(
        "--special-tokens", nargs="*", default=list(CHAT_TOKENS), help=f"(default: {' '.join(CHAT_TOKENS)})"
    )
    add_schema_argument(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and write the model."""
    check_output(options.output)
    with elapsed("Reading the texts") as rename:
        lines = conversation_lines(options.inputs, options.schema, options.special_tokens)
        model = train_tokenizer(
            _then(lines, lambda: rename("Training")),
            options.vocab_size,
            options.special_tokens,
            model_type=options.model_type,
        )
    files.write_bytes(options.output, model)
    print(f"pieces  {options.vocab_size:,}, of them special: {' '.join(options.special_tokens) or 'none'}")
    print(f"written {options.output}")
    return 0


def _then(lines: Iterable[str], call: Callable[[], None]) -> Iterator[str]:
    """The lines, and a call after the last one."""
    yield from lines
    call()
