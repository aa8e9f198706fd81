"""`grain-sft inspect`: one row of a step, token by token."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from grain_sft.cli.arguments import add_config, at_least, check_output, open_config
from grain_sft.progress import elapsed
from grain_sft.storage import atomic_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config(parser, host="rows of host h of H (default: 0/1, all rows)")
    parser.add_argument("--step", type=at_least(0), required=True, metavar="K", help="step, from 0")
    row = "row of the host's batch (default: 0; with --html, all rows)"
    parser.add_argument("--row", type=at_least(0), metavar="R", help=row)
    add_tokenizer(parser)
    parser.add_argument("--html", metavar="FILE", help="write a page with this step, the one before and the one after")
    colour = "(default: auto: on a terminal, unless NO_COLOR is set)"
    parser.add_argument("--colour", "--color", choices=("auto", "always", "never"), default="auto", help=colour)


def add_tokenizer(parser: argparse.ArgumentParser) -> None:
    """Add `--tokenizer`, which decodes tokens for display."""
    text = "(default: the folder 'tokenizer' of the corpus; else ids are shown)"
    parser.add_argument("--tokenizer", metavar="PATH", help=text)


def run(options: argparse.Namespace) -> int:
    """Print the row or write the page, and return the exit status."""
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
