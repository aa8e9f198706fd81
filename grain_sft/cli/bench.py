"""`grain-sft bench`: what a config delivers on this machine; or what the pipeline does with made-up corpora, beside the limit
and beside MaxText's loader."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

from grain_sft.cli.arguments import add_figures, at_least, figures_output, host_of, positive, write_figures
from grain_sft.progress import elapsed

_OF_MADE_UP = (
    *("dir", "files", "tokens", "sequence_length", "batch_size", "startup_files", "no_startup", "no_orders"),
    *("order_rows", "no_packed", "no_prepare", "conversations", "no_trace", "documents", "only", "no_together"),
    *("together_tokens", "no_plans", "plan_documents"),
)
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
        "--seconds", type=positive, help="of each measurement (default: 2); with CONFIG, of all of it (default: 20)"
    )
    parser.add_argument(
        "--repeats", type=at_least(1), default=3, help="measurements of each loader, in turn (default: 3)"
    )
    add_figures(parser)
    _add_config_arguments(parser.add_argument_group("of a config"))
    _add_made_up_arguments(parser.add_argument_group("of made-up corpora, without CONFIG"))


def _add_config_arguments(parser: Any) -> None:
    parser.add_argument("--host", type=host_of, metavar="h/H", help="measure as host h of H (default: 0/1, all rows)")
    parser.add_argument(
        "--tokens-per-second", type=positive, metavar="T", help="of one accelerator (default: a table of several)"
    )
    parser.add_argument(
        "--step-ms",
        type=positive,
        action="append",
        metavar="MS",
        help="what a training step takes without its data; may be given several times (default: 10 and 50)",
    )
    parser.add_argument(
        "--max-workers", type=at_least(0), metavar="N", help="worker processes to try (default: the cores, up to 8)"
    )


def _add_made_up_arguments(parser: Any) -> None:
    parser.add_argument("--dir", help="where to put the token files (default: a temporary folder)")
    parser.add_argument("--files", type=at_least(1), default=8, help="token files (default: 8)")
    parser.add_argument("--tokens", type=at_least(1), default=16_000_000, help="tokens a file (default: 16,000,000)")
    parser.add_argument("--sequence-length", type=at_least(1), default=8192, help="tokens a row (default: 8192)")
    parser.add_argument("--batch-size", type=at_least(1), default=8, help="rows a batch (default: 8)")
    parser.add_argument(
        "--startup-files", type=at_least(1), nargs="+", default=[8, 950], help="files of the indexes (default: 8 950)"
    )
    parser.add_argument("--no-startup", action="store_true", help="leave out the start-up times")
    parser.add_argument("--no-orders", action="store_true", help="leave out the orders of many rows")
    parser.add_argument(
        "--order-rows", type=at_least(1), default=100_000_000, help="rows of the exact order (default: 100 M)"
    )
    parser.add_argument("--no-packed", action="store_true", help="leave out packed rows")
    parser.add_argument("--no-plans", action="store_true", help="leave out plans of many documents")
    parser.add_argument(
        "--plan-documents", type=at_least(10), default=2_270_000, help="that they are of (default: 2,270,000)"
    )
    parser.add_argument("--no-prepare", action="store_true", help="leave out the preparation of conversations")
    parser.add_argument(
        "--conversations", type=at_least(10), default=100_000, help="to prepare, of some 200 tokens (default: 100,000)"
    )
    parser.add_argument("--no-trace", action="store_true", help="leave out tracing")
    parser.add_argument(
        "--documents",
        type=at_least(10),
        default=100_000,
        help="to trace, of some 10,000 tokens, as sparse files (default: 100,000; OLMo-3's run: 2,268,468)",
    )
    parser.add_argument(
        "--only",
        choices=("windows", "packed", "plans", "prepare", "trace", "together"),
        help="measure this and nothing else",
    )
    parser.add_argument("--no-together", action="store_true", help="leave out eight processes that start together")
    parser.add_argument(
        "--together-tokens", type=at_least(10_000), default=400_000_000, help="that they pack (default: 400 M)"
    )


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


def _of_config(options: argparse.Namespace) -> dict[str, object]:
    """What a config delivers."""
    from grain_sft.bench import config_bench as of_config
    from grain_sft.bench import config_report as of_config_report
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
    for line in of_config_report.lines(figures, os.path.basename(options.config)):
        print(line)
    return {"config": options.config, **figures}


def _made_up(options: argparse.Namespace) -> dict[str, object]:
    """What the pipeline does with corpora that are made for it."""
    from grain_sft.bench import packed, plans, together, trace
    from grain_sft.bench import prepare as preparing

    options.seconds = options.seconds or 2.0
    with tempfile.TemporaryDirectory(prefix="grain_sft_bench_") as temporary:
        folder = Path(options.dir or temporary)
        figures: dict[str, object] = {}
        if options.only in (None, "windows"):
            _windows(options, folder, figures)
        if options.only == "packed" or (options.only is None and not options.no_packed):
            with elapsed("Measuring packed rows"):
                of_packed = packed.measure(folder, options.seconds, options.repeats)
            figures["packed"] = packed.report(of_packed)
        if options.only == "plans" or (options.only is None and not options.no_plans):
            with elapsed("Measuring plans"):
                of_plans = plans.measure(folder, options.plan_documents)
            figures["plans"] = plans.report(of_plans)
        if options.only == "prepare" or (options.only is None and not options.no_prepare):
            with elapsed("Measuring the preparation of conversations"):
                of_preparing = preparing.measure(folder, options.conversations)
            figures["prepare"] = preparing.report(of_preparing)
        if options.only == "trace" or (options.only is None and not options.no_trace):
            with elapsed("Measuring traces"):
                of_trace = trace.measure(folder, options.documents)
            figures["trace"] = trace.report(of_trace)
        if options.only == "together" or (options.only is None and not options.no_together):
            folder.mkdir(parents=True, exist_ok=True)
            with elapsed("Measuring eight processes"):
                of_together = together.measure(folder, options.together_tokens)
            figures["together"] = together.report(of_together)
    return figures


def _windows(options: argparse.Namespace, folder: Path, figures: dict[str, object]) -> None:
    """Throughput, start-up and orders."""
    from grain_sft.bench import orders, startup, throughput

    with elapsed("Measuring windows"):
        paths = throughput.make_tokens(folder, options.files, options.tokens)
        rows = throughput.measure(paths, options.sequence_length, options.batch_size, options.seconds, options.repeats)
    figures["throughput"] = throughput.report(rows, options.sequence_length * options.batch_size)
    figures["wait_s"] = throughput.waits(paths, options.sequence_length, options.batch_size)
    if not options.no_startup:
        with elapsed("Measuring the start"):
            of_startup = startup.measure(folder, options.startup_files, options.repeats)
        figures["startup"] = startup.report(of_startup)
    if not options.no_orders:
        folder.mkdir(parents=True, exist_ok=True)
        with elapsed("Measuring orders"):
            of_orders = orders.measure(folder, options.order_rows)
        figures["orders"] = orders.report(of_orders)
