"""Commands `bench`, which measures speeds, and `demo`, which trains a small model."""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from grain_sft.bench import BENCHMARKS, Scale
from grain_sft.cli.arguments import Parser, at_least, check_output, host_of, open_stage, positive, values_of, write_figures
from grain_sft.options import options_of
from grain_sft.progress import elapsed
from grain_sft.storage import files

MIN_DEMO_STEPS = 9  # the demo writes a checkpoint after each third of its steps, and kills a run between two checkpoints

# options of `bench` by their use; `seconds` and `repeats` apply with and without CONFIG
_SIZES = [name for name in options_of(Scale) if name not in ("seconds", "repeats")]
_ONLY_WITHOUT_CONFIG = ["dir", "only", *_SIZES]
_ONLY_WITH_CONFIG = ["host", "stage", "tokens_per_second", "step_ms", "max_workers"]


def demo(parser: Parser) -> None:
    """Declare `grain-sft demo`."""
    add, count = parser.add_argument, at_least(MIN_DEMO_STEPS)
    add("--dir", default="grain_sft_demo", help="folder of the demo's files: new, empty, or of an earlier demo")
    add("--steps", type=count, default=48, help=f"steps of training, {MIN_DEMO_STEPS} or more")
    add("--seed", type=at_least(0), default=0, help="seed of the order of rows and of the model (default: 0)")


def run_demo(options: argparse.Namespace) -> int:
    """Run `grain-sft demo`."""
    from grain_sft.demo import run_demo

    return run_demo(options.dir, steps=options.steps, seed=options.seed)


def bench(parser: Parser) -> None:
    """Declare `grain-sft bench`."""
    config = "path of a .yaml or .json config to measure instead of made-up corpora"
    parser.add_argument("config", nargs="?", help=config)
    seconds = "seconds of each measurement (default: 2); with CONFIG, of all measurements together (default: 20)"
    parser.add_argument("--seconds", type=positive, help=seconds)
    parser.add_declared(Scale, ("repeats",))
    parser.add_figures()
    of_config = parser.add_argument_group("measurements of a config")
    add = of_config.add_argument
    add("--host", type=host_of, metavar="h/H", help="measure as host h of H (default: 0/1, all rows)")
    parser.add_stage(of_config)
    speed = "tokens per second of one accelerator (default: several speeds)"
    add("--tokens-per-second", type=positive, metavar="T", help=speed)
    step = "time of a training step, not counting the wait for data; may be given several times (default: 10 and 50)"
    add("--step-ms", type=positive, action="append", metavar="MS", help=step)
    add("--max-workers", type=at_least(0), metavar="N", help="try up to N worker processes (default: one per core, at most 8)")
    made_up = parser.add_argument_group("measurements of made-up corpora, without CONFIG")
    add = made_up.add_argument
    only = "measure only this benchmark; may be given several times (default: all)"
    add("--only", choices=list(BENCHMARKS), action="append", help=only)
    add("--dir", help="folder of the made-up token files, which are removed (default: the system's temporary folder)")
    parser.add_declared(Scale, _SIZES, made_up)


def run_bench(options: argparse.Namespace) -> None:
    """Run `grain-sft bench`."""
    measure, refused, reason = _measure_made_up, _ONLY_WITH_CONFIG, "only with CONFIG"
    if options.config is not None:
        measure, refused, reason = _measure_config, _ONLY_WITHOUT_CONFIG, "only without CONFIG, for made-up corpora"
    for flag in options.parser.flags_given(options, refused):
        options.parser.error(f"argument {flag}: {reason}")
    write_figures(measure, options)


def _measure_config(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the pipeline of a config, print the figures and the advice, and return the figures."""
    from grain_sft.bench import advice
    from grain_sft.bench import config as config_bench

    given = values_of(options, ("repeats", "max_workers", "tokens_per_second"))
    seconds, steps_ms = options.seconds or config_bench.SECONDS, options.step_ms or config_bench.STEPS_MS
    plan = config_bench.Plan(seconds=seconds, steps_ms=steps_ms, **given)
    pipeline = open_stage(options, outputs=[options.output])
    with elapsed("Measuring"):
        figures = config_bench.measure(pipeline, plan)
    print(*advice.lines(figures, os.path.basename(options.config)), sep="\n")
    return {"config": options.config, **figures}


def _measure_made_up(options: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmarks of made-up corpora, print their tables, and return the rows of each table by its key."""
    check_output(options.output)
    scale = Scale(seconds=options.seconds or Scale.seconds, **values_of(options, ("repeats", *_SIZES)))
    figures: dict[str, Any] = {}
    if options.dir is not None:
        options.dir = files.normalize(options.dir)
        files.check_writable(options.dir, folder=True)
        os.makedirs(options.dir, exist_ok=True)
    for name in options.only or BENCHMARKS:
        made_in = tempfile.TemporaryDirectory(prefix="grain_sft_bench_", dir=options.dir)
        with made_in as folder, elapsed(f"Measuring {name}"):
            tables = list(BENCHMARKS[name](Path(folder), scale))
        for table in tables:
            figures[table.key] = table.rows
            print("", *table.lines(), sep="\n")
    return figures
