"""`grain-sft train-tokenizer`: a SentencePiece model of conversations."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from grain_sft.cli.arguments import at_least, check_output
from grain_sft.cli.prepare import add_schema
from grain_sft.prepare import CHAT_TOKENS, MIN_VOCAB, conversation_lines, train_tokenizer
from grain_sft.progress import elapsed
from grain_sft.storage import files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help="files of conversations or texts, as for prepare")
    parser.add_argument("-o", "--output", required=True, help="the model's file")
    parser.add_argument("--vocab-size", type=at_least(MIN_VOCAB), default=16_000, help="(default: 16,000)")
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="bpe", help="(default: bpe)")
    special = " ".join(CHAT_TOKENS)
    parser.add_argument("--special-tokens", nargs="*", default=list(CHAT_TOKENS), help=f"(default: {special})")
    add_schema(parser)


def run(options: argparse.Namespace) -> int:
    """Train, and write the model."""
    check_output(options.output)
    special = options.special_tokens
    with elapsed("Reading the texts") as rename:

        def lines() -> Iterator[str]:
            yield from conversation_lines(options.inputs, options.schema, special)
            rename("Training")

        model = train_tokenizer(lines(), options.vocab_size, special, model_type=options.model_type)
    files.write_bytes(options.output, model)
    print(f"pieces  {options.vocab_size:,}, of them special: {' '.join(special) or 'none'}")
    print(f"written {options.output}")
    return 0
