"""`grain-sft build-sft-primer`: the primer SFT cache, by the options of niels_gpt's tool."""

from __future__ import annotations

import argparse

from grain_sft.cli import preparing
from grain_sft.cli.types import at_least, share
from grain_sft.prepare import Dataset, Request
from grain_sft.storage import files

NAME = "primer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--primer-jsonl", default="data/primer.jsonl", help="(default: data/primer.jsonl)")
    parser.add_argument(
        "--out-dir", default="data/cache/sft", help="the cache goes to OUT_DIR/primer (default: data/cache/sft)"
    )
    parser.add_argument("--seed", type=at_least(0), default=42, help="of the split (default: 42)")
    parser.add_argument(
        "--val-frac", type=share, default=0.1, help="share of the examples for validation (default: 0.1)"
    )
    parser.add_argument(
        "--t-max", type=at_least(2), default=1024, help="the model's context: longer examples keep their end"
    )
    parser.add_argument("--tokenizer", help="a SentencePiece model with <|sys|>, <|usr|>, <|asst|> and <|eot|>")
    preparing.add_run_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Build it."""
    trained = files.join(files.normalize(options.out_dir), f"{NAME}.tokenizer.model")
    request = Request(
        datasets=(Dataset((options.primer_jsonl,)),),
        template=NAME,
        tokenizer=preparing.find_tokenizer(options.tokenizer, options.primer_jsonl, trained),
        format=NAME,
        seed=options.seed,
        val_frac=options.val_frac,
        max_length=options.t_max,
        source=NAME,
    )
    return preparing.run_request(request, files.join(options.out_dir, NAME), options)
