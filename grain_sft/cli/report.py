"""`grain-sft report`: what a config's run is made of, as a page with pictures and their numbers."""

from __future__ import annotations

import argparse
import json
import os

from grain_sft.cli.arguments import add_config, at_least, check_output, not_negative, open_config
from grain_sft.cli.inspect import add_tokenizer
from grain_sft.errors import ConfigError
from grain_sft.progress import elapsed
from grain_sft.storage import atomic_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config(parser)
    output = "the page (default: report.html); beside it FILE's name with .json, and a .png of each picture"
    parser.add_argument("-o", "--output", default="report.html", metavar="FILE", help=output)
    parser.add_argument("--steps", type=at_least(1), default=64, help="steps that are sampled, at most (default: 64)")
    seconds = "for each speed; 0 measures none (default: 1)"
    parser.add_argument("--seconds", type=not_negative, default=1.0, help=seconds)
    add_tokenizer(parser)


def run(options: argparse.Namespace) -> int:
    """Gather, draw, write."""
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
        report = view.make_report(pipeline, texts, name=os.path.basename(options.config), steps=options.steps)
    if options.seconds:
        with elapsed("Measuring"):
            report["throughput"] = speed.report_speed(pipeline, options.seconds)
    with elapsed("Drawing"):
        pictures = view.draw_pictures(report)
        written: dict[str, str | bytes] = {f"{base}.json": json.dumps(report, indent=2) + "\n"}
        written |= {f"{base}.{name}.png": picture.png for name, picture in pictures.items()}
        written[options.output] = view.report_page(report, pictures)
    for path, content in written.items():
        with atomic_write(path, "wb" if isinstance(content, bytes) else "w") as file:
            file.write(content)
        print(path)
    return 0
