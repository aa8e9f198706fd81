"""`grain-sft index`: scan token files, describe them, and write an index."""

from __future__ import annotations

import argparse
import collections

from grain_sft.cli.arguments import add_corpus_options, at_least, check_output, open_paths
from grain_sft.layout import WindowLayout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("where", nargs="+", help="a mix file, directory, glob, index, or token files; local or gs://")
    parser.add_argument("-o", "--output", help="the index to write (JSON); without it the corpus is only described")
    add_corpus_options(parser)
    parser.add_argument("--sequence-length", type=at_least(1), help="tokens of a row; counts the rows")
    maxtext = "write MaxText's olmo_grain index (with -o and --sequence-length)"
    parser.add_argument("--maxtext", action="store_true", help=maxtext)


def run(options: argparse.Namespace) -> int:
    """Scan the token files, print a description of the corpus, and write the index."""
    length = options.sequence_length
    if options.maxtext and not (options.output and length):
        options.parser.error("--maxtext needs --output and --sequence-length: MaxText's index is made for one length.")
    check_output(options.output)
    corpus = open_paths(options.where, options)
    print(f"shards       {len(corpus.shards):,}")
    print(f"tokens       {corpus.num_tokens:,} {corpus.dtype.name}")
    print(f"fingerprint  {corpus.ends_fingerprint}")
    masks = sum(shard.loss is not None for shard in corpus.shards)
    if masks or corpus.ignores_loss:
        print(f"loss masks   {f'{masks:,}' if masks else 'ignored'}")
    shard_counts = collections.Counter(shard.label for shard in corpus.shards)
    token_counts: collections.Counter[str] = collections.Counter()
    for shard in corpus.shards:
        token_counts[shard.label] += shard.num_tokens
    for label, count in token_counts.most_common() if any(shard_counts) else ():
        share = count / max(1, corpus.num_tokens)
        print(f"  {share:6.2%}  {count:>18,} tokens  {shard_counts[label]:>5,} shards  {label}")
    if length is not None:
        print(f"rows         {len(WindowLayout(corpus, length)):,} of {length:,} tokens")
    if options.output:
        corpus.save(options.output, format="maxtext" if options.maxtext else "grain_sft", sequence_length=length)
        print(f"written      {options.output}")
    return 0
