"""`grain-sft bench`: what a config delivers on this machine; or what the pipeline does with made-up corpora, beside the limit
and beside the loaders of others."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from grain_sft.bench import BENCHMARKS, SCALE_HELP, Scale
from grain_sft.cli.arguments import add_figures, at_least, figures_output, host_of, positive, write_figures
from grain_sft.progress import elapsed

_OF_MADE_UP = ("dir", "only", *SCALE_HELP)
_OF_CONFIG = ("host", "tokens_per_second", "step_ms", "max_workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.set_defaults(parser=parser)
    parser.add_argument(
        "config",
        nargs="?",
        help="path of a .yaml or .json config: it alone is measured, and none of the made-up corpora",
    )
    parser.add_argument(
        "--seconds",
        type=positive,
        help="seconds of each measurement (default: 2); with CONFIG, of all of them (default: 20)",
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="measurements of each loader, in turn (default: 3)"
    )
    add_figures(parser)
    config = parser.add_argument_group("of a config")
    config.add_argument("--host", type=host_of, metavar="h/H", help="measure as host h of H (default: 0/1, all rows)")
    config.add_argument(
        "--tokens-per-second", type=positive, metavar="T", help="speed of one accelerator (default: a table of several)"
    )
    config.add_argument(
        "--step-ms",
        type=positive,
        action="append",
        metavar="MS",
        help="time of a training step without its data; may be given several times (default: 10 and 50)",
    )
    config.add_argument(
        "--max-workers", type=at_least(0), metavar="N", help="worker processes to try (default: the cores, up to 8)"
    )
    made_up = parser.add_argument_group("of made-up corpora, without CONFIG")
    made_up.add_argument(
        "--only",
        choices=list(BENCHMARKS),
        action="append",
        help="measure this, and nothing else that is not named so too (default: everything)",
    )
    made_up.add_argument("--dir", help="where to put the token files (default: a temporary folder)")
    for name, text in SCALE_HELP.items():
        default = getattr(Scale, name)
        several: dict[str, Any] = {"nargs": "+"} if isinstance(default, tuple) else {}
        shown = " ".join(map(str, default)) if several else f"{default:,}"
        option = f"--{name.replace('_', '-')}"
        made_up.add_argument(option, type=at_least(1), default=default, help=f"{text} (default: {shown})", **several)


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    for name in _OF_CONFIG if options.config is None else _OF_MADE_UP:
        if getattr(options, name) != options.parser.get_default(name):
            fits = "only with CONFIG" if options.config is None else "only without CONFIG, for made-up corpora"
            options.parser.error(f"argument --{name.replace('_', '-')}: {fits}")
    if options.output and options.config and os.path.abspath(options.output) == os.path.abspath(options.config):
        options.parser.error("argument -o/--output: CONFIG would be written over")
    with figures_output(options):
        figures = _made_up(options) if options.config is None else _of_config(options)
    write_figures(figures, options)
    return 0


def _of_config(options: argparse.Namespace) -> dict[str, Any]:
    from grain_sft.bench import advice
    from grain_sft.bench import config as of_config
    from grain_sft.config import load
    from grain_sft.sampling import Host

    plan = of_config.Plan(
        seconds=options.seconds or of_config.SECONDS,
        repeats=options.repeats,
        steps_ms=options.step_ms or of_config.STEPS_MS,
        max_workers=options.max_workers,
        tokens_per_second=options.tokens_per_second,
    )
    with elapsed("Measuring"):
        figures = of_config.measure(load(options.config, host=options.host or Host(0, 1)), plan)
    for line in advice.lines(figures, os.path.basename(options.config)):
        print(line)
    return {"config": options.config, **figures}


def _made_up(options: argparse.Namespace) -> dict[str, Any]:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Scale)}
    scale = Scale(**given | {"seconds": options.seconds or Scale.seconds})
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grain_sft_bench_") as temporary:
        folder = Path(options.dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only or BENCHMARKS:
            with elapsed(f"Measuring {name}"):
                found = BENCHMARKS[name].measure(folder, scale)
            figures |= found
            print("\n".join(["", *BENCHMARKS[name].lines(found)]))
    return figures
