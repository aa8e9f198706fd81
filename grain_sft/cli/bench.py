"""`grain-sft bench`: the speed of a config; or, on made-up corpora, of the pipeline, the machine and other loaders."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from grain_sft.bench import BENCHMARKS, Scale
from grain_sft.cli.arguments import add_declared, add_figures, at_least, host_of, open_config, positive, write_figures
from grain_sft.options import options_of
from grain_sft.progress import elapsed

_SIZES = [name for name in options_of(Scale) if name not in ("seconds", "repeats")]
_OF_MADE_UP = ("dir", "only", *_SIZES)
_OF_CONFIG = ("host", "tokens_per_second", "step_ms", "max_workers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    config = "path of a .yaml or .json config: it alone is measured, and none of the made-up corpora"
    parser.add_argument("config", nargs="?", help=config)
    seconds = "seconds of each measurement (default: 2); with CONFIG, of all of them (default: 20)"
    parser.add_argument("--seconds", type=positive, help=seconds)
    add_declared(parser, Scale, ("repeats",))
    add_figures(parser)
    of_config = parser.add_argument_group("of a config")
    host = "measure as host h of H (default: 0/1, all rows)"
    of_config.add_argument("--host", type=host_of, metavar="h/H", help=host)
    speed = "speed of one accelerator (default: a table of several)"
    of_config.add_argument("--tokens-per-second", type=positive, metavar="T", help=speed)
    step = "time of a training step without its data; may be given several times (default: 10 and 50)"
    of_config.add_argument("--step-ms", type=positive, action="append", metavar="MS", help=step)
    workers = "worker processes to try (default: the cores, up to 8)"
    of_config.add_argument("--max-workers", type=at_least(0), metavar="N", help=workers)
    made_up = parser.add_argument_group("of made-up corpora, without CONFIG")
    only = "measure this, and nothing else that is not named so too (default: everything)"
    made_up.add_argument("--only", choices=list(BENCHMARKS), action="append", help=only)
    made_up.add_argument("--dir", help="where to put the token files (default: a temporary folder)")
    add_declared(made_up, Scale, _SIZES)


def run(options: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    for name in _OF_CONFIG if options.config is None else _OF_MADE_UP:
        if getattr(options, name) != options.parser.get_default(name):
            fits = "only with CONFIG" if options.config is None else "only without CONFIG, for made-up corpora"
            options.parser.error(f"argument --{name.replace('_', '-')}: {fits}")
    if options.output and options.config and os.path.abspath(options.output) == os.path.abspath(options.config):
        options.parser.error("argument -o/--output: CONFIG would be written over")
    measure = _made_up if options.config is None else _of_config
    write_figures(lambda: measure(options), options)
    return 0


def _of_config(options: argparse.Namespace) -> dict[str, Any]:
    from grain_sft.bench import advice
    from grain_sft.bench import config as of_config

    plan = of_config.Plan(
        seconds=options.seconds or of_config.SECONDS,
        steps_ms=options.step_ms or of_config.STEPS_MS,
        **{name: getattr(options, name) for name in ("repeats", "max_workers", "tokens_per_second")},
    )
    pipeline = open_config(options)
    with elapsed("Measuring"):
        figures = of_config.measure(pipeline, plan)
    print(*advice.lines(figures, os.path.basename(options.config)), sep="\n")
    return {"config": options.config, **figures}


def _made_up(options: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(options, name) for name in ("repeats", *_SIZES)}
    scale = Scale(seconds=options.seconds or Scale.seconds, **given)
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="grain_sft_bench_") as temporary:
        folder = Path(options.dir or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.only or BENCHMARKS:
            with elapsed(f"Measuring {name}"):
                found = BENCHMARKS[name].measure(folder, scale)
            figures |= found
            print("", *BENCHMARKS[name].lines(found), sep="\n")
    return figures
