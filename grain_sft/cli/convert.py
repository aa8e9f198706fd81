"""`grain-sft convert`: the same documents in another format."""

from __future__ import annotations

import argparse

from grain_sft.cli.prepare import add_sizes, print_summary
from grain_sft.prepare import FORMATS, convert
from grain_sft.progress import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("corpus", help="a directory in format olmo, episodes, primer or openchat")
    parser.add_argument("-o", "--output", required=True, help="a folder that is new or empty; local or gs://")
    parser.add_argument("--format", required=True, choices=list(FORMATS), help="format of the output")
    parser.add_argument("--tokenizer", help="tokenizer of a corpus that holds none")
    add_sizes(parser)
    parser.add_argument("--overwrite", action="store_true", help="begin anew where the output is of another corpus")


def run(options: argparse.Namespace) -> int:
    """Convert the corpus."""
    names = ("tokenizer", "part_bytes", "shard_tokens", "overwrite")
    given = {name: getattr(options, name) for name in names}
    with progress_bar() as progress:
        manifest = convert(options.corpus, options.output, options.format, **given, progress=progress)
    print_summary(manifest, options.output)
    return 0
