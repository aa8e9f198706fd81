"""Command `trace`, which prints the documents that steps read, or the steps that read documents."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from grain_sft import provenance
from grain_sft.cli.arguments import Parser, at_least, open_config, steps_of
from grain_sft.errors import CorpusError
from grain_sft.layout import documents_of_record, numbers_in
from grain_sft.pipeline import Pipeline
from grain_sft.progress import elapsed
from grain_sft.provenance import Labels, Trace

_BETWEEN = "steps between two checkpoints: step1000 step7000 means 1000 to 6999, because stepN is saved after N steps"

_UNUSED = {
    "checkpoints": ("host", "summary", "no_trainable", "tokenizer"),
    **dict.fromkeys(("steps", "between"), ("epochs", "tokenizer")),
    **dict.fromkeys(("document", "record"), ("tokenizer",)),
}
"""Options that each question (`--steps`, `--record`, ...) does not use. For example, `--record` does not use `--tokenizer`."""


def trace(parser: Parser) -> None:
    """Declare `grain-sft trace`."""
    parser.add_config(host="only rows of host h of H (default: all hosts)")
    asked = parser.add_argument_group("questions (give one)").add_mutually_exclusive_group(required=True)
    add = asked.add_argument
    add("--steps", metavar="A:B", help="steps A to B - 1, counted from 0; or one step")
    add("--between", nargs=2, metavar="NAME", help=_BETWEEN)
    document = "number of a document in the run, or in a source of a mixture; may be given several times"
    add("--document", type=_document, action="append", metavar="[SOURCE:]N", help=document)
    add("--record", metavar="ID", help="documents that were prepared from a line of an input: LINE or INPUT:LINE")
    add("--find", metavar="TEXT", help="documents that contain a text")
    table = "table of epochs, rows and tokens read, after each N steps (default: 1000); epochs count from 0"
    add("--checkpoints", nargs="?", type=at_least(1), const=1000, metavar="N", help=table)
    add = parser.add_argument
    epochs = "epochs to search or list (default: all; if they never end, up to the one in which the last stage begins)"
    add("--epochs", type=at_least(1), help=epochs)
    add("--tokenizer", metavar="PATH", help="tokenizer for --find (default: the folder 'tokenizer' of the corpus)")
    add("--summary", action="store_true", help="print the tokens and documents of each source, instead of the trace")
    add("--no-trainable", action="store_true", help="don't count the tokens that take loss, and read no loss files")
    add("--format", choices=list(provenance.WRITERS), help="format (default: from the suffix of --output, else table)")
    add("-o", "--output", metavar="FILE", help="file to write (default: standard output)")


def run_trace(options: argparse.Namespace) -> None:
    """Run `grain-sft trace`."""
    for question, unused in _UNUSED.items():
        given = options.parser.flags_given(options, unused)
        if given and getattr(options, question) is not None:
            options.parser.error(f"--{question} does not use {', '.join(given)}. Leave it out.")
    pipeline = open_config(options, outputs=[options.output])
    kind = options.format or provenance.SUFFIXES.get(os.path.splitext(options.output or "")[1], "table")
    if options.checkpoints is not None:
        columns = provenance.checkpoint_table(pipeline, options.checkpoints, epochs=options.epochs)
        title = f"every {options.checkpoints} steps"
        tables: Iterable[dict[str, Any]] = [{"checkpoint": [f"step{step}" for step in columns["step"]]} | columns]
    else:
        with elapsed("Searching"):
            title, traces = _answer(pipeline, options)
        tables = _summary(traces, kind) if options.summary else (_columns(part, kind) for part in traces)
    # a clock on stderr would disturb lines that appear while the trace runs
    clock = elapsed("Tracing") if options.output or options.summary else contextlib.nullcontext()
    with clock, provenance.open_writer(kind, options.output, pipeline.receipt, title) as writer:
        for table in tables:
            writer(table)


def _answer(pipeline: Pipeline, options: argparse.Namespace) -> tuple[str, Iterator[Trace]]:
    """Return (title, traces that answer the question). A title is "steps 1000:7000" or "document 5: seen 3 times"."""
    scope: dict[str, Any] = {"host": options.host, "trainable": not options.no_trainable}
    of_host = f", host {options.host.index}/{options.host.count}" if options.host else ""
    if (between := options.between) is not None or options.steps is not None:
        steps = provenance.steps_between(pipeline, *between) if between else steps_of(pipeline, options.steps)
        return f"steps {steps.start}:{steps.stop}{of_host}", provenance.iter_trace(pipeline, steps, **scope)
    documents, question = _documents(pipeline, options)
    lines = provenance.find_document(pipeline, documents, epochs=options.epochs, **scope)
    # Segments are counted, or rows of preference pairs, because a pair is one document in several segments. Lines are not
    # counted, because a segment has two lines if its document continues in the next shard.
    occurrences, counted = [lines.step, lines.row], "rows"
    if not pipeline.stages[0].source.layout.of_pairs:
        occurrences, counted = [*occurrences, lines.segment], "segments"
    num_occurrences = len({*zip(*(column.tolist() for column in occurrences), strict=True)})
    seen = f"seen {num_occurrences} times" if len(documents) == 1 else f"seen in {num_occurrences} {counted}"
    answer = seen if num_occurrences else "never seen: in no row, or not in the steps searched"
    if len(documents) != 1:
        answer = f"{len(documents)} documents, {answer}" if documents else "no document"
    return f"{question}{of_host}: {answer}", iter([lines])


def _documents(pipeline: Pipeline, options: argparse.Namespace) -> tuple[list[int], str]:
    """Return (documents, question): the documents asked for, by their numbers in the run, and the question in words."""
    run = pipeline.documents
    documents: list[int] = []
    if options.document is not None:
        asked = dict.fromkeys(options.document)
        for name, number in asked:
            documents += provenance.numbers_of_document(run, name, number).tolist()
        given = [f"{name}:{number}" if name else str(number) for name, number in asked]
        return documents, f"document {', '.join(given)}"
    failed: list[tuple[str, CorpusError]] = []
    parts = list(run.parts)  # (name of a source, or ""; the source's layout; the layout of its stage)
    for name, part, layout in parts:
        try:
            if options.record is not None:
                matches = documents_of_record(part.corpus, options.record)
            else:
                tokenizer = provenance.tokenizer_of(part.corpus, options.tokenizer)
                matches = provenance.documents_with_text(part.corpus, tokenizer, options.find)
            # `matches` are numbers in the part's corpus, and `run.of` takes numbers in `layout`
            documents += run.of(layout, numbers_in(part, matches) + layout.first_document(name)).tolist()
        except CorpusError as error:  # for example, the source has no tokenizer; raised only if every source fails
            if len(parts) == 1:
                raise
            failed.append((repr(name) if name else part.corpus.shards[0].path, error))
            if len(failed) == len(parts):
                raise CorpusError("\n".join(f"{source}: {reason}" for source, reason in failed)) from error
    if failed:
        names = ", ".join(dict.fromkeys(name for name, _ in failed))
        print(f"Sources not searched: {names}. The first error: {failed[0][1]}", file=sys.stderr)
    return documents, f"record {options.record}" if options.record is not None else f"text {options.find!r}"


def _document(text: str) -> tuple[str, int]:
    """Parse SOURCE:N. The source of a plain N is ""."""
    name, _, number = text.rpartition(":")
    return name, at_least(0)(number)


def _columns(part: Trace, kind: str) -> dict[str, Any]:
    """Return the columns to write, with names of files and sources. In the kind "table", file names have no folder."""
    paths = part.paths if kind != "table" else [path.rpartition("/")[2] for path in part.paths]
    sources = [text or str(number) for number, text in enumerate(part.source_names)]
    columns: dict[str, Any] = {}
    for name, column in part.columns().items():
        columns[name] = Labels(column, sources) if name == "source" else column
        if name == "shard":
            columns["file"] = Labels(column, paths)
    return columns


def _summary(parts: Iterator[Trace], kind: str) -> Iterator[dict[str, Any]]:
    """Yield one table of the tokens and documents of each source. The kind "table" has totals too."""
    columns = provenance.summarize(parts)
    if kind == "table":
        if len(columns["source"]) != 1:
            columns = {name: [*column, "all" if name == "source" else sum(column)] for name, column in columns.items()}
        # 0 means that the documents are unknown, and -1 is printed as "-"
        columns["documents"] = [count or -1 for count in columns["documents"]]
    yield columns
