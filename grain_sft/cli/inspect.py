"""`grain-sft inspect`: what a row of a step looks like, token by token."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from typing import TYPE_CHECKING

from grain_sft.cli.output import check_output
from grain_sft.cli.progress import elapsed
from grain_sft.cli.types import at_least, host_of
from grain_sft.config import load
from grain_sft.sampling import Host
from grain_sft.storage.files import atomic_write

if TYPE_CHECKING:
    from grain_sft.pipeline import Pipeline
    from grain_sft.view.token_text import TokenTexts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", help="path of a .yaml or .json config")
    parser.add_argument("--step", type=at_least(0), required=True, metavar="K", help="from 0")
    parser.add_argument(
        "--row", type=at_least(0), metavar="R", help="of the host's batch (default: 0; with --html, all rows)"
    )
    parser.add_argument("--host", type=host_of, metavar="h/H", help="rows of host h of H (default: 0/1, all rows)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="(default: the folder 'tokenizer' of the corpus; else ids are shown)"
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with this step, the one before and the one after")
    parser.add_argument(
        "--colour",
        "--color",
        choices=("auto", "always", "never"),
        default="auto",
        help="(default: auto: on a terminal, unless NO_COLOR is set)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the row, or write the page."""
    from grain_sft.view.inspect_page import inspect_page
    from grain_sft.view.rows import view_rows
    from grain_sft.view.terminal import row_lines

    check_output(options.html)
    with elapsed("Opening"):
        pipeline = load(options.config, host=options.host or Host(0, 1))
    texts = texts_of(pipeline, options.tokenizer)
    if options.html:
        rows = None if options.row is None else [options.row]
        with elapsed("Drawing"):
            page = inspect_page(pipeline, options.step, texts, rows=rows, title=os.path.basename(options.config))
        with atomic_write(options.html) as file:
            file.write(page)
        print(f"{options.html}: step {options.step}, {len(page.encode()) / 1e6:.1f} MB; open it in a browser")
        return 0
    (view,) = view_rows(pipeline, options.step, [options.row or 0])
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # signs, where the terminal's encoding has none
    colour = options.colour == "always" or (options.colour == "auto" and _has_colour())
    for line in row_lines(view, texts, colour=colour, width=shutil.get_terminal_size().columns):
        print(line)
    return 0


def texts_of(pipeline: Pipeline, path: str | None) -> TokenTexts:
    """The texts of the corpus's tokens; none, with a line on stderr, where no tokenizer is given or beside it."""
    from grain_sft.provenance.text import find_tokenizer, tokenizer_of
    from grain_sft.view.token_text import TokenTexts

    corpus = pipeline.source.layout.corpus
    if path is None and (path := find_tokenizer(corpus)) is None:
        print("no folder 'tokenizer' is beside the corpus: ids are shown. Give --tokenizer.", file=sys.stderr)
        return TokenTexts(None)
    return TokenTexts(tokenizer_of(corpus, path))


def _has_colour() -> bool:
    """Whether standard output is a terminal that is wanted in colour (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
