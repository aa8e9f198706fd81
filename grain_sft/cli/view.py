"""Commands that show a run: `trace` the documents of steps, `inspect` a row token by token, `report` figures and pictures."""

import argparse
import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any

from grain_sft import provenance
from grain_sft.cli.arguments import Parser, at_least, check_output, not_negative, open_config
from grain_sft.errors import ConfigError, CorpusError, RowIndexError
from grain_sft.pipeline import Pipeline
from grain_sft.progress import elapsed
from grain_sft.provenance import Labels, Trace
from grain_sft.storage import atomic_write

_TOKENIZER = "(default: the folder 'tokenizer' of the corpus; else ids are shown)"
_BETWEEN = """two checkpoints, such as step1000 step7000: the steps from the one to the other. stepN is written after N steps,
so these are steps 1000 to 6999"""


def trace(parser: Parser) -> None:
    """Declare `grain-sft trace`."""
    parser.add_config(host="only rows of host h of H (default: all of one)")
    asked = parser.add_argument_group("what is asked (one of these)").add_mutually_exclusive_group(required=True)
    add = asked.add_argument
    add("--steps", metavar="A:B", help="steps A to B - 1, counted from 0; or one step")
    add("--between", nargs=2, metavar="NAME", help=_BETWEEN)
    document = "a document's number, in a mixture that of a source's own; again for more"
    add("--document", type=_document, action="append", metavar="[SOURCE:]N", help=document)
    add("--record", metavar="ID", help="a line of an input that was prepared: LINE or INPUT:LINE")
    add("--find", metavar="TEXT", help="documents that hold a text")
    table = "a table of where the run is after each EVERY steps (default: 1000); epochs count from 0"
    add("--checkpoints", nargs="?", type=at_least(1), const=1000, metavar="EVERY", help=table)
    add = parser.add_argument
    add("--epochs", type=at_least(1), help="epochs to search (default: all, or 1 where they never end)")
    add("--tokenizer", metavar="PATH", help="of --find (default: the folder 'tokenizer' of the corpus)")
    add("--summary", action="store_true", help="tokens and documents by source instead of lines")
    add("--no-trainable", action="store_true", help="don't count tokens that take loss, so read no loss files")
    add("--format", choices=list(provenance.WRITERS), help="(default: as --output is named, or a table)")
    add("-o", "--output", metavar="FILE", help="(default: standard output)")
    parser.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    check_output(options.output)
    pipeline = open_config(options)
    kind = options.format or provenance.SUFFIXES.get(os.path.splitext(options.output or "")[1], "table")
    parts: Iterator[Any]
    if options.checkpoints is not None:
        columns = provenance.checkpoint_table(pipeline, options.checkpoints, epochs=options.epochs)
        about = f"every {options.checkpoints} steps"
        parts = iter([{"checkpoint": [f"step{step}" for step in columns["step"]]} | columns])
    else:
        with elapsed("Searching"):
            about, traces = _asked(pipeline, options)
        parts = (_columns(part, kind) for part in traces)
        if options.summary:
            parts = (_summary(all_parts, kind) for all_parts in [traces])
    quiet = options.output or options.summary  # else the lines themselves show how far it is
    shown = elapsed("Tracing") if quiet else contextlib.nullcontext()
    with shown, provenance.open_writer(kind, options.output, pipeline.receipt, about) as writer:
        for part in parts:
            writer(part)
    return 0


def _asked(pipeline: Pipeline, options: argparse.Namespace) -> tuple[str, Iterator[Trace]]:
    """Return the question in words, and the traces that answer it."""
    counted: dict[str, Any] = {"host": options.host, "trainable": not options.no_trainable}
    of_host = f", host {options.host.index}/{options.host.count}" if options.host else ""
    if options.between is not None or options.steps is not None:
        between = options.between is not None
        steps = provenance.steps_between(pipeline, *options.between) if between else _steps(pipeline, options.steps)
        return f"steps {steps.start}:{steps.stop}{of_host}", provenance.iter_trace(pipeline, steps, **counted)
    documents, about = _documents(pipeline, options)
    found = provenance.find_document(pipeline, documents, epochs=options.epochs, **counted)
    places = [found.step, found.row] if pipeline.source.layout.of_pairs else [found.step, found.row, found.segment]
    times = len({*zip(*(column.tolist() for column in places), strict=True)})
    many = f"{len(documents)} documents, " if len(documents) > 1 else ""
    seen = f"{many}seen {times} times" if times else f"{many}never seen: in no row, or not in the steps searched"
    return f"{about}{of_host}: {seen if documents else 'no document'}", iter([found])


def _documents(pipeline: Pipeline, options: argparse.Namespace) -> tuple[list[int], str]:
    """Return the numbers of the documents in question, and the question in words."""
    layout = pipeline.source.layout
    if options.document is not None:
        numbers = [provenance.number_of_document(layout, name, number) for name, number in options.document]
        return numbers, f"document {', '.join(f'{name}:{number}'.lstrip(':') for name, number in options.document)}"
    found: list[int] = []
    problem: CorpusError | None = None
    parts = provenance.layouts_of(layout)
    for first, part in parts:
        try:
            if options.record is not None:
                some = provenance.documents_of_record(part.corpus, options.record)
            else:
                tokenizer = provenance.tokenizer_of(part.corpus, options.tokenizer)
                some = provenance.documents_with_text(part.corpus, tokenizer, options.find)
            found += (provenance.numbers_in(part, some) + first).tolist()
        except CorpusError as error:  # some sources of a mixture may lack records, or a tokenizer
            problem = error
            if len(parts) == 1:
                raise
    if problem is not None and not found:
        raise problem
    return found, f"record {options.record}" if options.record is not None else f"text {options.find!r}"


def _document(text: str) -> tuple[str, int]:
    """Parse SOURCE:N or N."""
    name, _, number = text.rpartition(":")
    return name, at_least(0)(number)


def _steps(pipeline: Pipeline, text: str) -> range:
    """Parse A:B, A:, :B or A."""
    first, colon, last = text.partition(":")
    try:
        begin = int(first) if first or not colon else 0
        end = int(last) if last else pipeline.sampler.num_steps if colon else begin + 1
    except ValueError:
        begin = end = -1
    if end is None:
        raise RowIndexError(f"--steps {text}: the run never ends; say where to: A:B.")
    if begin < 0 or end < begin:
        raise RowIndexError(f"--steps {text}: expected A:B with A up to B, which are steps A to B - 1, or one step.")
    return range(begin, end)


def _columns(part: Trace, kind: str) -> dict[str, Any]:
    """Return the columns to write: files and sources by name; in a table, files without their folders."""
    paths = part.paths if kind != "table" else [path.rpartition("/")[2] for path in part.paths]
    named: dict[str, Any] = {}
    for name, column in part.columns().items():
        named[name] = column
        if name == "shard":
            named["file"] = Labels(column, paths)
        elif name == "source":
            named[name] = Labels(column, [text or str(number) for number, text in enumerate(part.source_names)])
    return named


def _summary(parts: Iterator[Trace], kind: str) -> dict[str, Any]:
    found = provenance.summarize(parts)
    if kind == "table" and len(found["source"]) != 1:
        found = {name: [*column, "all" if name == "source" else sum(column)] for name, column in found.items()}
    return found


def inspect(parser: Parser) -> None:
    """Declare `grain-sft inspect`."""
    parser.add_config(host="rows of host h of H (default: 0/1, all rows)")
    add = parser.add_argument
    add("--step", type=at_least(0), required=True, metavar="K", help="step, from 0")
    row = "row of the host's batch (default: 0; with --html, all rows)"
    add("--row", type=at_least(0), metavar="R", help=row)
    add("--tokenizer", metavar="PATH", help=_TOKENIZER)
    add("--html", metavar="FILE", help="write a page with this step, the one before and the one after")
    colour = "(default: auto: on a terminal, unless NO_COLOR is set)"
    add("--colour", "--color", choices=("auto", "always", "never"), default="auto", help=colour)
    parser.set_defaults(run=_inspect)


def _inspect(options: argparse.Namespace) -> int:
    from grain_sft import view

    check_output(options.html)
    pipeline = open_config(options)
    texts = view.texts_of(pipeline.source.layout.corpus, options.tokenizer)
    if options.html:
        rows = None if options.row is None else [options.row]
        with elapsed("Drawing"):
            page = view.inspect_page(pipeline, options.step, texts, rows=rows, title=os.path.basename(options.config))
        with atomic_write(options.html) as file:
            file.write(page)
        print(f"{options.html}: step {options.step}, {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
        return 0
    (row,) = view.view_rows(pipeline, options.step, [options.row or 0])
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # the terminal's encoding may lack some characters
    colour = options.colour == "always" or (options.colour == "auto" and view.wants_colour())
    print(*view.row_lines(row, texts, colour=colour, width=shutil.get_terminal_size().columns), sep="\n")
    return 0


def report(parser: Parser) -> None:
    """Declare `grain-sft report`."""
    parser.add_config()
    add = parser.add_argument
    output = "the page; beside it FILE's name with .json, and a .png of each picture"
    add("-o", "--output", default="report.html", metavar="FILE", help=output)
    add("--steps", type=at_least(1), default=64, help="steps that are sampled, at most")
    add("--seconds", type=not_negative, default=1.0, help="for each speed; 0 measures none")
    add("--tokenizer", metavar="PATH", help=_TOKENIZER)
    parser.set_defaults(run=_report)


def _report(options: argparse.Namespace) -> int:
    from grain_sft import view
    from grain_sft.bench import config as speed

    view.require_matplotlib()
    base = os.path.splitext(options.output)[0]
    if os.path.abspath(options.config) in (os.path.abspath(f"{base}.json"), os.path.abspath(options.output)):
        raise ConfigError(f"--output {options.output}: {options.config} would be written over. Give another name.")
    for path in (options.output, f"{base}.json"):
        check_output(path)
    pipeline = open_config(options)
    texts = view.texts_of(pipeline.source.layout.corpus, options.tokenizer)
    with elapsed("Sampling steps"):
        found = view.make_report(pipeline, texts, name=os.path.basename(options.config), steps=options.steps)
    if options.seconds:
        with elapsed("Measuring"):
            found["throughput"] = speed.report_speed(pipeline, options.seconds)
    with elapsed("Drawing"):
        pictures = view.draw_pictures(found)
        written: dict[str, str | bytes] = {f"{base}.json": json.dumps(found, indent=2) + "\n"}
        written |= {f"{base}.{name}.png": picture.png for name, picture in pictures.items()}
        written[options.output] = view.report_page(found, pictures)
    for path, content in written.items():
        with atomic_write(path, "wb" if isinstance(content, bytes) else "w") as file:
            file.write(content)
        print(path)
    return 0
