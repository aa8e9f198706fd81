"""What `prepare-chat-sft` and `prepare-tool-sft` share: the options of the episode tools."""

from __future__ import annotations

import argparse

from grain_sft.cli import preparing
from grain_sft.cli.types import at_least, share
from grain_sft.prepare import Dataset, Request


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options, in both spellings."""
    parser.add_argument("--input", required=True, help="JSONL of conversations")
    parser.add_argument("--output_dir", "--output-dir", required=True, help="folder of the dataset, new or empty")
    parser.add_argument(
        "--val_split", "--val-split", type=share, default=0.1, help="share for validation (default: 0.1)"
    )
    parser.add_argument("--seed", type=at_least(0), default=42, help="of the split (default: 42)")
    parser.add_argument("--tokens_per_shard", "--tokens-per-shard", type=at_least(1), default=50_000_000)
    parser.add_argument("--tokenizer", help="a SentencePiece model, a tokenizer.json, or a directory")
    parser.add_argument("--system_prompt", "--system-prompt", help="for conversations without one")
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help="at a bad record (default: stop)")
    parser.add_argument("--special-text", choices=("error", "encode"), default="error")
    preparing.add_run_arguments(parser)


def run(options: argparse.Namespace, template: str) -> int:
    """Prepare the dataset with a template."""
    trained = f"{options.output_dir.rstrip('/')}.tokenizer.model"
    request = Request(
        datasets=(Dataset((options.input,)),),
        template=template,
        tokenizer=preparing.find_tokenizer(options.tokenizer, options.input, trained),
        format="episodes",
        seed=options.seed,
        val_frac=options.val_split,
        on_error=options.on_error,
        special_text=options.special_text,
        system_prompt=options.system_prompt,
        shard_tokens=options.tokens_per_shard,
    )
    return preparing.run_request(request, options.output_dir, options)
