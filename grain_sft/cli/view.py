"""Commands `inspect`, which shows a row token by token, and `report`, which writes a page with figures and pictures."""

import argparse
import json
import os
import shutil

from grain_sft.cli.arguments import Parser, at_least, not_negative, open_config, open_stage
from grain_sft.errors import ConfigError
from grain_sft.progress import elapsed

_TOKENIZER = "tokenizer of the texts (default: the corpus's folder 'tokenizer'; without a tokenizer, ids are shown)"


def inspect(parser: Parser) -> None:
    """Declare `grain-sft inspect`."""
    parser.add_config(host="rows of host h of H (default: 0/1, all rows)")
    add = parser.add_argument
    add("--step", type=at_least(0), required=True, metavar="K", help="step, from 0")
    add("--row", type=at_least(0), metavar="R", help="row of the host's batch (default: 0; with --html, as many as fit)")
    add("--tokenizer", metavar="PATH", help=_TOKENIZER)
    add("--html", metavar="FILE", help="write a page with this step, the step before it and the step after it")
    colour = "when to use colours (default: auto, that is, on a terminal unless NO_COLOR is set)"
    add("--colour", "--color", choices=("auto", "always", "never"), default="auto", help=colour)


def run_inspect(options: argparse.Namespace) -> None:
    """Run `grain-sft inspect`."""
    from grain_sft import view
    from grain_sft.storage import write_bytes

    pipeline = open_config(options, outputs=[options.html])
    texts = view.texts_of(pipeline.at(options.step).source.layout.corpus, options.tokenizer)
    if options.html:
        rows = None if options.row is None else [options.row]
        with elapsed("Drawing"):
            title = os.path.basename(options.config)
            page = view.inspect_page(pipeline, options.step, texts, rows=rows, title=title).encode()
        write_bytes(options.html, page)
        print(f"{options.html}: step {options.step}, {len(page) / 1e6:.1f} MB; open it in a browser")
        return
    (row,) = view.view_rows(pipeline, options.step, [options.row or 0])
    colour = options.colour == "always" or (options.colour == "auto" and view.wants_colour())
    print(*view.row_lines(row, texts, colour=colour, width=shutil.get_terminal_size().columns), sep="\n")


def report(parser: Parser) -> None:
    """Declare `grain-sft report`."""
    parser.add_config()
    add = parser.add_argument
    output = "page to write (default: report.html); the numbers (.json) and the pictures (.png) are written next to it"
    add("-o", "--output", default="report.html", metavar="FILE", help=output)
    add("--steps", type=at_least(1), default=64, help="maximum number of steps that are sampled")
    add("--seconds", type=not_negative, default=1.0, help="time to measure each speed; 0 measures no speed")
    add("--tokenizer", metavar="PATH", help=_TOKENIZER)
    parser.add_stage()


def run_report(options: argparse.Namespace) -> None:
    """Run `grain-sft report`."""
    from grain_sft import view
    from grain_sft.bench import config as speed
    from grain_sft.storage import files

    view.require_matplotlib()
    base = os.path.splitext(options.output)[0]
    pipeline = open_stage(options, outputs=[options.output, f"{base}.json"])
    if options.output == f"{base}.json":
        fault = "the page would replace the file of its numbers, which has the same name"
        raise ConfigError(f"--output {options.output}: {fault}. Name it {base}.html.")
    texts = view.texts_of(pipeline.source.layout.corpus, options.tokenizer)
    with elapsed("Sampling steps"):
        found = view.make_report(pipeline, texts, name=os.path.basename(options.config), steps=options.steps)
    if options.seconds:
        with elapsed("Measuring"):
            found["throughput"] = speed.report_speed(pipeline, options.seconds)
    with elapsed("Drawing"):
        pictures = view.draw_pictures(found)
        written = {f"{base}.json": (json.dumps(found, indent=2) + "\n").encode()}
        written |= {f"{base}.{name}.png": picture.png for name, picture in pictures.items()}
        written[options.output] = view.report_page(found, pictures).encode()
    for path, content in written.items():
        files.write_bytes(path, content)
        print(path)
