"""Commands `index`, which describes the token files of a corpus, and `pack`, which packs their documents into rows."""

import argparse
import collections
import time
from typing import Any

from grain_sft.bench import Table
from grain_sft.cli.arguments import Parser, at_least, check_output, open_paths, values_of, write_figures
from grain_sft.corpus import Corpus, check_corpus_stays
from grain_sft.layout import PackedLayout, WindowLayout, algorithm_title, compare_algorithms, packing_report, plan_files
from grain_sft.progress import elapsed, progress_bar

PACKING = (
    *("long_documents", "source_group_size", "ties", "max_segments", "boundaries", "bos_token_id", "seed", "epochs"),
    "batch_rows",
)
"""Arguments of `PackedLayout` that become options of `pack`."""
NEEDS = {"algorithm": ["materialize"], "materialize": ["shard_bytes"], "batch_tokens": ["ranks", "model_type"]}
"""Options of `pack`, each with a list of the options that need it. For example, `--materialize` needs `--algorithm`."""


def index(parser: Parser) -> None:
    """Declare `grain-sft index`."""
    add = parser.add_argument
    add("where", nargs="+", help="a mix file, directory, glob, index, or token files; local or gs://")
    add("-o", "--output", help="index to write (JSON); without this option, the corpus is only described")
    parser.add_corpus_options()
    add("--sequence-length", type=at_least(1), help="tokens of a row; the number of rows is then printed too")
    add("--maxtext", action="store_true", help="write MaxText's olmo_grain index (with -o and --sequence-length)")


def run_index(options: argparse.Namespace) -> None:
    """Run `grain-sft index`."""
    length = options.sequence_length
    if options.maxtext and not (options.output and length):
        options.parser.error("--maxtext needs --output and --sequence-length: MaxText's index is made for one length.")
    check_output(options.output, inputs=options.where)
    corpus = open_paths(options.where, options)
    if options.output:
        check_corpus_stays(options.output, corpus, options.where)
    _line("shards", f"{len(corpus.shards):,}")
    _line("tokens", f"{corpus.num_tokens:,} {corpus.dtype.name}")
    _line("fingerprint", corpus.ends_fingerprint)
    masks = sum(shard.loss is not None for shard in corpus.shards)
    if masks or corpus.ignores_loss:
        _line("loss masks", f"{masks:,}" if masks else "ignored")
    shards, tokens = collections.Counter[str](), collections.Counter[str]()
    for shard in corpus.shards:
        shards[shard.label] += 1
        tokens[shard.label] += shard.num_tokens
    for label, count in tokens.most_common() if any(shards) else ():
        print(f"  {count / max(1, corpus.num_tokens):6.2%}  {count:>18,} tokens  {shards[label]:>5,} shards  {label}")
    if length is not None:
        _line("rows", f"{len(WindowLayout(corpus, length)):,} of {length:,} tokens")
    if options.output:
        corpus.save(options.output, format="maxtext" if options.maxtext else "grain_sft", sequence_length=length)
        _line("written", options.output)


def pack(parser: Parser) -> None:
    """Declare `grain-sft pack`."""
    add = parser.add_argument
    add("corpus", nargs="+", help="what open_corpus takes: a prepared corpus, a mix, an index, ...")
    add("--sequence-length", type=at_least(1), required=True, help="tokens of a row")
    parser.add_declared(PackedLayout, ("algorithm",), default=None, help="packing algorithm (default: compare all)")
    add("--compare", action="store_true", help="after the report of --algorithm, also compare it with all algorithms")
    parser.add_declared(PackedLayout, PACKING, parser.add_argument_group("rows"))
    parser.add_corpus_options(parser.add_argument_group("files"))
    rate = parser.add_argument_group("OpenChat's automatic learning rate").add_argument
    rate("--batch-tokens", type=at_least(1), help="tokens in a rank's batch, with padding; makes pack print the rate")
    rate("--ranks", type=at_least(1), default=1, help="number of data-parallel processes")
    rate("--model-type", default="", help="a name such as openchat_v3.2_mistral (default: none)")
    folder = "folder to write the rows of --algorithm to, as a corpus for layout kind materialized; local or gs://"
    add("--materialize", metavar="FOLDER", help=folder)
    add("--shard-bytes", type=at_least(1), default=1 << 30, help="maximum size of a file of rows (default: 1 GiB)")
    parser.add_figures()


def run_pack(options: argparse.Namespace) -> int:
    """Run `grain-sft pack`. Return status 1 if algorithms were compared and all failed, else 0."""
    for needed, names in NEEDS.items():
        given = options.parser.flags_given(options, names)
        if given and getattr(options, needed) is None:
            options.parser.error(f"{given[0]} needs --{needed.replace('_', '-')}. Give both, or neither.")
    check_output(options.materialize, folder=True)
    check_output(options.output, inputs=options.corpus)
    compared = write_figures(_figures, options).get("algorithms")
    return 1 if compared and all("error" in algorithm for algorithm in compared) else 0


def _figures(options: argparse.Namespace) -> dict[str, Any]:
    """Pack, compare and write as the options ask. Print and return the figures."""
    corpus = open_paths(options.corpus, options)
    if options.output is not None:
        check_corpus_stays(options.output, corpus, options.corpus)
    packing = values_of(options, ("algorithm", *PACKING))
    figures: dict[str, Any] = {"corpus": _describe(corpus)}
    if options.algorithm is not None:
        begin = time.perf_counter()
        layout = PackedLayout(corpus, options.sequence_length, **packing)
        figures["packing"] = _describe_packing(layout, time.perf_counter() - begin)
    if options.compare or options.algorithm is None:
        figures["algorithms"] = _compare(corpus, options.sequence_length, packing)
    figures["learning_rate"] = _learning_rate(corpus, options)
    if options.materialize is not None:  # then `algorithm` is given too (see `NEEDS`), so `layout` is set
        figures["materialized"] = _materialize(layout, options)
    return figures


def _describe(corpus: Corpus) -> dict[str, Any]:
    """Find the documents of a corpus. Print and return their counts."""
    begin = time.perf_counter()
    counts = {"documents": len(corpus.documents), "tokens": corpus.num_tokens}
    seconds = time.perf_counter() - begin
    in_documents = int(corpus.documents.length.sum())
    _line("corpus", f"{counts['documents']:,} documents, {counts['tokens']:,} tokens, in {len(corpus.shards):,} files")
    outside = corpus.num_tokens - in_documents
    if outside > 0:
        _line("", f"{outside:,} tokens are in no document")
    elif outside < 0:
        _line("", f"documents overlap by {-outside:,} tokens or more")
    _line("", f"{corpus.ends_fingerprint} (documents found in {seconds:.2f} s)")
    return {**counts, "tokens_in_documents": in_documents, "fingerprint": corpus.ends_fingerprint, "seconds": seconds}


def _describe_packing(layout: PackedLayout, seconds: float) -> dict[str, Any]:
    """Print and return the figures of a packing, whose plan took `seconds` to make or to read."""
    from grain_sft.pipeline import layout_receipt  # imported here, so that --help does not wait for Grain

    found = packing_report(layout) | {"plans": plan_files(layout), "seconds": seconds}
    found["receipt"] = layout_receipt(layout)
    attention = found["attention"]  # a list: one dict for each number of rows per device
    epochs = f" in {layout.epochs} epochs" if layout.epochs > 1 else ""
    _line("algorithm", f"{algorithm_title(found)}{epochs}, planned or read from the cache in {seconds:.2f} s")
    _line("rows", f"{found['rows']:,} of {layout.sequence_length:,} tokens")
    _line("padding", f"{found['padding']:,} tokens, {found['padding_share']:.3%}")
    _line("truncated", f"{found['truncated_documents']:,} documents by {found['truncated_tokens']:,} tokens")
    _line("dropped", f"{found['dropped_documents']:,} documents of {found['dropped_tokens']:,} tokens")
    _line("split", f"{found['split_documents']:,} documents in several pieces")
    _line("segments", "mean {mean:.2f}, median {median:g}, max {max:,} a row".format(**found["segments_a_row"]))
    costs = {name: ", ".join(f"{entry[name]:.2f}" for entry in attention) for name in ("shuffled", "floor", "balanced")}
    rows = ", ".join(str(entry["rows_a_device"]) for entry in attention)
    devices = attention[0]["devices"]
    _line("attention", f"highest cost / mean cost of {devices} devices, for {rows} rows per device, by order:")
    _line("", f"random rows: {costs['shuffled']} (lower bound, by the longest segments: {costs['floor']})")
    _line("", f"balanced: {costs['balanced']}")
    for plan in found["plans"]:
        _line("plan", plan["fingerprint"])
        _line("", plan["path"])
    _line("receipt", f"{found['receipt']}: hash of the corpus and its rows, the same on every machine")
    return found


def _compare(corpus: Corpus, sequence_length: int, packing: dict[str, Any]) -> list[dict[str, Any]]:
    """Pack the corpus by each algorithm. Print a table, and return the figures of each."""
    with elapsed("Packing"):
        found = list(compare_algorithms(corpus, sequence_length, packing))
    columns = {"rows": "{rows:,}", "padding": "{padding_share:.3%}", "truncated": "{truncated_tokens:,}"}
    columns |= {"dropped": "{dropped_tokens:,}", "split": "{split_documents:,}"}
    columns |= {"seg. mean": "{segments_a_row[mean]:.2f}", "med.": "{segments_a_row[median]:g}"}
    columns |= {"max": "{segments_a_row[max]:,}", "attn.": "{attention[0][shuffled]:.2f}", "seconds": "{seconds:.2f}"}
    print("", *Table("", "", columns, {algorithm_title(each): each for each in found}).lines(), sep="\n")
    for each in found:
        if "error" in each:
            print(f"{algorithm_title(each)}: {each['error']}")
    print("truncated, dropped: tokens; split: documents in several pieces; seconds: to make, write and check a plan")
    print("attn.: highest attention cost of a device / mean cost of the devices, with one random row each")
    print("multipack x N: in batches of N rows (--batch-rows; in a config, the global batch); a larger N pads less\n")
    return found


def _learning_rate(corpus: Corpus, options: argparse.Namespace) -> dict[str, Any]:
    """Print and return the share of tokens that take loss and, with --batch-tokens, OpenChat's learning rate."""
    from grain_sft.replay import learning_rate

    ratio = learning_rate.supervised_ratio(corpus)
    _line("supervised", f"{ratio:.4%} of the tokens take loss as targets")
    if options.batch_tokens is None:
        return {"supervised_ratio": ratio}
    arguments = values_of(options, ("batch_tokens", "ranks", "model_type"))
    rate = learning_rate.learning_rate_of(ratio, **arguments)
    _line("learning rate", f"{rate:.4e}, OpenChat's for batches of {options.batch_tokens * options.ranks:,} tokens")
    return {"supervised_ratio": ratio, "learning_rate": rate, **arguments}


def _materialize(layout: PackedLayout, options: argparse.Namespace) -> dict[str, Any]:
    """Write the rows of `layout` to the folder `--materialize`. Print and return what was written."""
    from grain_sft.prepare import materialize

    begin = time.perf_counter()
    with progress_bar() as progress:
        written = materialize(layout, options.materialize, shard_bytes=options.shard_bytes, progress=progress)
    seconds = time.perf_counter() - begin
    _line("rows written", f"{options.materialize}, {len(written['rows_of_shards']):,} shards, in {seconds:.1f} s")
    _line("", f"ends-{written['fingerprint']}")
    return written | {"seconds": seconds}


def _line(name: str, text: str) -> None:
    """Print a line of figures. A line without a name continues the one above."""
    print(f"{name:14}{text}")
