"""`grain-sft convert`: the same documents in another format."""

from __future__ import annotations

import argparse

from grain_sft.cli.preparing import print_summary
from grain_sft.cli.progress import progress_bar
from grain_sft.cli.types import at_least
from grain_sft.prepare import FORMATS, convert


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("corpus", help="a directory in format olmo, episodes, primer or openchat")
    parser.add_argument("-o", "--output", required=True, help="a folder that is new or empty; local or gs://")
    parser.add_argument("--format", required=True, choices=list(FORMATS), help="of the output")
    parser.add_argument("--tokenizer", help="where the corpus holds none")
    parser.add_argument("--part-bytes", type=at_least(8), default=1 << 30, help="olmo: (default: 1 GiB)")
    parser.add_argument(
        "--tokens-per-shard", type=at_least(1), default=50_000_000, help="episodes: (default: 50,000,000)"
    )
    parser.add_argument("--overwrite", action="store_true", help="begin anew where the output is of another corpus")


def run(options: argparse.Namespace) -> int:
    """Convert."""
    with progress_bar() as progress:
        manifest = convert(
            options.corpus,
            options.output,
            options.format,
            tokenizer=options.tokenizer,
            part_bytes=options.part_bytes,
            shard_tokens=options.tokens_per_shard,
            overwrite=options.overwrite,
            progress=progress,
        )
    print_summary(manifest, options.output)
    return 0
