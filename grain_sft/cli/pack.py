"""`grain-sft pack`: documents packed into rows; what comes of it, by one algorithm or by all of them side by side."""

from __future__ import annotations

import argparse
import time
from typing import Any

from grain_sft.cli.arguments import (
    add_corpus_options,
    add_declared,
    add_figures,
    at_least,
    check_output,
    open_paths,
    write_figures,
)
from grain_sft.corpus import Corpus
from grain_sft.layout import PackedLayout, algorithm_title, compare_algorithms, packing_report, plan_files
from grain_sft.progress import progress_bar

PACKING = (
    *("long_documents", "source_group_size", "ties", "max_segments", "boundaries", "bos_token_id", "seed", "epochs"),
    "batch_rows",
)
"""Options of `PackedLayout`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("corpus", nargs="+", help="what open_corpus takes: a prepared corpus, a mix, an index, ...")
    parser.add_argument("--sequence-length", type=at_least(1), required=True, help="tokens of a row")
    compared = "Algorithm; compares all of them if none is given."
    add_declared(parser, PackedLayout, ("algorithm",), default=None, help=compared)
    parser.add_argument("--compare", action="store_true", help="compare all algorithms, after the report of one")
    add_declared(parser.add_argument_group("rows"), PackedLayout, PACKING)
    add_corpus_options(parser.add_argument_group("files"))
    rate = parser.add_argument_group("OpenChat's automatic learning rate")
    rate.add_argument("--batch-tokens", type=at_least(1), help="tokens of one rank, padding included; prints the rate")
    rate.add_argument("--ranks", type=at_least(1), default=1, help="data-parallel processes (default: 1)")
    rate.add_argument("--model-type", default="", help="a name such as openchat_v3.2_mistral (default: none)")
    folder = "write the rows of --algorithm there, as a corpus for layout kind materialized; local or gs://"
    parser.add_argument("--materialize", metavar="FOLDER", help=folder)
    size = "size of a file of rows (default: 1 GiB)"
    parser.add_argument("--shard-bytes", type=at_least(1), default=1 << 30, help=size)
    add_figures(parser)


def run(options: argparse.Namespace) -> int:
    """Pack, print, write: status 1 if no algorithm can pack the corpus."""
    if options.materialize is not None and options.algorithm is None:
        options.parser.error("--materialize needs --algorithm: the rows of one are written.")
    check_output(options.materialize, folder=True)
    figures = write_figures(lambda: _figures(options), options)
    return 1 if all("error" in each for each in figures.get("algorithms", ({},))) else 0


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    """Pack and print, and return the figures."""
    corpus = open_paths(options.corpus, options)
    packing = {name: getattr(options, name) for name in PACKING}
    figures: dict[str, Any] = {"corpus": _corpus(corpus)}
    if options.algorithm is not None:
        begin = time.perf_counter()
        layout = PackedLayout(corpus, options.sequence_length, algorithm=options.algorithm, **packing)
        figures["packing"] = _one(layout, time.perf_counter() - begin)
    if options.compare or options.algorithm is None:
        figures["algorithms"] = _compare(corpus, options.sequence_length, packing)
    figures["learning_rate"] = _learning_rate(corpus, options)
    if options.materialize is not None:
        figures["materialized"] = _materialize(layout, options)
    return figures


def _corpus(corpus: Corpus) -> dict[str, Any]:
    begin = time.perf_counter()
    documents = len(corpus.documents)
    seconds = time.perf_counter() - begin
    in_documents = int(corpus.documents.length.sum())
    _line("corpus", f"{documents:,} documents, {corpus.num_tokens:,} tokens, in {len(corpus.shards):,} files")
    if in_documents != corpus.num_tokens:
        _line("", f"{corpus.num_tokens - in_documents:,} tokens are in no document")
    _line("", f"{corpus.ends_fingerprint} (documents found in {seconds:.2f} s)")
    found = {"documents": documents, "tokens": corpus.num_tokens, "tokens_in_documents": in_documents}
    return {**found, "fingerprint": corpus.ends_fingerprint, "seconds": seconds}


def _one(layout: PackedLayout, seconds: float) -> dict[str, Any]:
    """Return the figures of a layout that was planned in `seconds`."""
    from grain_sft.pipeline import layout_receipt  # imports Grain, which --help does not wait for

    found = packing_report(layout) | {"plans": plan_files(layout), "seconds": seconds}
    found["receipt"] = layout_receipt(layout)
    segments = found["segments_a_row"]
    epochs = f" in {layout.epochs} epochs" if layout.epochs > 1 else ""
    _line("algorithm", f"{algorithm_title(found)}{epochs}, planned or read from the cache in {seconds:.2f} s")
    _line("rows", f"{found['rows']:,} of {layout.sequence_length:,} tokens")
    _line("padding", f"{found['padding']:,} tokens, {found['padding_share']:.3%}")
    _line("truncated", f"{found['truncated_documents']:,} documents by {found['truncated_tokens']:,} tokens")
    _line("dropped", f"{found['dropped_documents']:,} documents of {found['dropped_tokens']:,} tokens")
    _line("split", f"{found['split_documents']:,} documents in several pieces")
    _line("segments", f"mean {segments['mean']:.2f}, median {segments['median']:g}, max {segments['max']:,} a row")
    for plan in found["plans"]:
        _line("plan", plan["fingerprint"])
        _line("", plan["path"])
    _line("receipt", f"{found['receipt']}, the same for the same rows wherever they were packed")
    return found


def _compare(corpus: Corpus, sequence_length: int, packing: dict[str, Any]) -> list[dict[str, Any]]:
    """Print a table of all algorithms, one epoch of each, whose plans are not kept."""
    line = "{:22}{:>11}{:>9}{:>15}{:>15}{:>11}{:>10}{:>6}{:>6}{:>9}".format
    print()
    print(line("", "rows", "padding", "truncated", "dropped", "split", "seg. mean", "med.", "max", "seconds"))
    found = []
    for each in compare_algorithms(corpus, sequence_length, packing):
        found.append(each)
        name = algorithm_title(each)
        if "error" in each:
            print(f"{name:22}  {each['error']}")
            continue
        segments = each["segments_a_row"]
        counts = (f"{each[key]:,}" for key in ("truncated_tokens", "dropped_tokens", "split_documents"))
        by_row = (f"{segments['mean']:.2f}", f"{segments['median']:g}", f"{segments['max']:,}")
        sizes = (f"{each['rows']:,}", f"{each['padding_share']:.3%}")
        print(line(name, *sizes, *counts, *by_row, f"{each['seconds']:.2f}"))
    print("truncated, dropped: tokens; split: documents in several pieces; seconds: to make, write and check a plan")
    print("multipack x N: for batches of N rows, --batch-rows; a config's is its global batch, and more rows pad less")
    print()
    return found


def _learning_rate(corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    from grain_sft.replay import learning_rate

    ratio = learning_rate.supervised_ratio(corpus)
    _line("supervised", f"{ratio:.4%} of the tokens take loss as targets")
    found: dict[str, Any] = {"supervised_ratio": ratio}
    if options.batch_tokens is not None:
        rate = learning_rate.automatic_learning_rate(corpus, options.batch_tokens, options.ranks, options.model_type)
        batch = options.batch_tokens * options.ranks
        _line("learning rate", f"{rate:.4e}, OpenChat's for batches of {batch:,} tokens")
        names = ("batch_tokens", "ranks", "model_type")
        found |= {"learning_rate": rate, **{name: getattr(options, name) for name in names}}
    return found


def _materialize(layout: PackedLayout, options: argparse.Namespace) -> dict[str, Any]:
    from grain_sft.prepare import materialize

    begin = time.perf_counter()
    with progress_bar() as progress:
        written = materialize(layout, options.materialize, shard_bytes=options.shard_bytes, progress=progress)
    seconds = time.perf_counter() - begin
    _line("rows written", f"{options.materialize}, {len(written['rows_of_shards']):,} shards, in {seconds:.1f} s")
    _line("", f"ends-{written['fingerprint']}")
    return written | {"seconds": seconds}


def _line(name: str, text: str) -> None:
    print(f"{name:14}{text}")
