"""`grain-sft index`: scan token files, write an index, say what is in it."""

from __future__ import annotations

import argparse
import collections

from grain_sft.cli.opening import add_mask_arguments, add_tokenizer_name
from grain_sft.cli.output import check_output
from grain_sft.cli.types import at_least, pair
from grain_sft.corpus import Corpus, open_corpus
from grain_sft.corpus.shard import TOKEN_DTYPES
from grain_sft.layout import WindowLayout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("where", nargs="+", help="a mix file, directory, glob, index, or token files; local or gs://")
    parser.add_argument("-o", "--output", help="the index to write (JSON); without it the corpus is only described")
    parser.add_argument("--dtype", choices=TOKEN_DTYPES, help="of headerless arrays (default: uint32, if it looks so)")
    parser.add_argument("--eos-token-id", type=at_least(0), help="the token that ends a document")
    add_tokenizer_name(parser)
    parser.add_argument(
        "--path-remap",
        action="append",
        type=pair,
        default=[],
        metavar="FROM=TO",
        help="replace the prefix FROM, or the placeholder {FROM}, in paths; may be given again",
    )
    add_mask_arguments(parser)
    parser.add_argument("--sequence-length", type=at_least(1), help="tokens of a row; counts the rows")
    parser.add_argument(
        "--maxtext", action="store_true", help="write MaxText's olmo_grain index (with -o and --sequence-length)"
    )
    parser.set_defaults(parser=parser)


def run(options: argparse.Namespace) -> int:
    """Scan, describe, write."""
    if options.maxtext and not (options.output and options.sequence_length):
        options.parser.error("--maxtext needs --output and --sequence-length: MaxText's index is made for one length.")
    check_output(options.output)
    corpus = open_corpus(
        options.where[0] if len(options.where) == 1 else options.where,
        dtype=options.dtype,
        eos_token_id=options.eos_token_id,
        path_remap=dict(options.path_remap),
        tokenizer=options.tokenizer_name,
        label_mask_paths=options.label_mask_paths,
        use_loss_mask=options.use_loss_mask,
    )
    _describe(corpus)
    if options.sequence_length is not None:
        layout = WindowLayout(corpus, options.sequence_length)
        print(f"rows         {len(layout):,} of {layout.sequence_length:,} tokens")
    if options.output:
        corpus.save(
            options.output,
            format="maxtext" if options.maxtext else "grain_sft",
            sequence_length=options.sequence_length,
        )
        print(f"written      {options.output}")
    return 0


def _describe(corpus: Corpus) -> None:
    shards: collections.Counter[str] = collections.Counter()
    tokens: collections.Counter[str] = collections.Counter()
    for shard in corpus.shards:
        shards[shard.label] += 1
        tokens[shard.label] += shard.num_tokens
    print(f"shards       {len(corpus.shards):,}")
    print(f"tokens       {corpus.num_tokens:,} {corpus.dtype.name}")
    print(f"fingerprint  {corpus.ends_fingerprint}")
    masks = sum(shard.loss is not None for shard in corpus.shards)
    if masks or corpus.ignores_loss:
        print(f"loss masks   {f'{masks:,}' if masks else 'ignored'}")
    if any(shards):
        for label, count in tokens.most_common():
            share = count / max(1, corpus.num_tokens)
            print(f"  {share:6.2%}  {count:>18,} tokens  {shards[label]:>5,} shards  {label}")
