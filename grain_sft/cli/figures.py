"""Commands that measure: `--json` prints their figures, `--output` keeps them."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Mapping
from typing import Any

from grain_sft.cli.output import check_output
from grain_sft.storage.files import atomic_write


def add_figures_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--json` and `--output`."""
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and everything else on stderr")
    parser.add_argument("-o", "--output", metavar="FILE", help="also write the figures to this file, as JSON")


def figures_output(options: argparse.Namespace) -> contextlib.AbstractContextManager[object]:
    """Check that the figures can be written; with `--json`, send what is printed meanwhile to stderr.

    Raises:
      StorageError: `--output` can't be written.
    """
    check_output(options.output)
    return contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext()


def write_figures(figures: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print and write the figures as the options ask."""
    text = json.dumps(figures, indent=2) + "\n"
    if options.output:
        with atomic_write(options.output) as file:
            file.write(text)
    if options.json:
        sys.stdout.write(text)
