"""`grain-sft report`: what a config's run is made of, as a page with pictures and their numbers."""

from __future__ import annotations

import argparse
import json
import math
import os

from grain_sft.cli.inspect import texts_of
from grain_sft.cli.output import check_output
from grain_sft.cli.progress import elapsed
from grain_sft.cli.types import at_least
from grain_sft.config import load
from grain_sft.errors import ConfigError
from grain_sft.sampling import Host
from grain_sft.storage.files import atomic_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("config", help="path of a .yaml or .json config")
    parser.add_argument(
        "-o",
        "--output",
        default="report.html",
        metavar="FILE",
        help="the page (default: report.html); beside it FILE's name with .json, and a .png of each picture",
    )
    parser.add_argument("--steps", type=at_least(1), default=64, help="sampled at most (default: 64)")
    parser.add_argument("--seconds", type=_seconds, default=1.0, help="for each speed; 0 measures none (default: 1)")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="(default: the folder 'tokenizer' of the corpus; else ids are shown)"
    )


def run(options: argparse.Namespace) -> int:
    """Gather, draw, write."""
    from grain_sft.view.pictures import Pictures, require_matplotlib
    from grain_sft.view.report import make_report
    from grain_sft.view.report_page import report_page

    require_matplotlib()
    base = os.path.splitext(options.output)[0]
    if os.path.abspath(options.config) in (os.path.abspath(f"{base}.json"), os.path.abspath(options.output)):
        raise ConfigError(f"--output {options.output}: {options.config} would be written over. Give another name.")
    for path in (options.output, f"{base}.json"):
        check_output(path)
    with elapsed("Opening"):
        pipeline = load(options.config, host=Host(0, 1))
    texts = texts_of(pipeline, options.tokenizer)
    name = os.path.basename(options.config)
    with elapsed("Sampling steps"):
        report = make_report(pipeline, texts, name=name, steps=options.steps, seconds=options.seconds)
    with elapsed("Drawing"):
        pictures = Pictures(report)
        written: dict[str, str | bytes] = {f"{base}.json": json.dumps(report, indent=2) + "\n"}
        written |= {f"{base}.{name}.png": pictures.png(name) for name in pictures}
        written[options.output] = report_page(report, pictures)
    for path, content in written.items():
        with atomic_write(path, "wb" if isinstance(content, bytes) else "w") as file:
            file.write(content)
        print(path)
    return 0


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number, 0 or more.")
    return value
