"""`grain-sft demo`: train, kill, resume, compare."""

from __future__ import annotations

import argparse

from grain_sft.cli.types import at_least

DEFAULT_STEPS = 48


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    from grain_sft.demo.data import DATA
    from grain_sft.demo.run import MIN_STEPS

    parser.add_argument(
        "--data",
        choices=tuple(DATA),
        default="chat",
        help="packed conversations with loss on the answers, or windows of plain text (default: chat)",
    )
    parser.add_argument(
        "--dir", default="grain_sft_demo", help="folder for everything it makes: new, empty, or an earlier demo's"
    )
    parser.add_argument(
        "--steps",
        type=at_least(MIN_STEPS),
        default=DEFAULT_STEPS,
        help=f"steps of training, {MIN_STEPS} or more (default: {DEFAULT_STEPS})",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of the order of rows and of the model (default: 0)"
    )


def run(options: argparse.Namespace) -> int:
    """Carry it out: 0 if the resumed run is the uninterrupted one bit for bit, else 1."""
    from grain_sft.demo.data import DATA
    from grain_sft.demo.run import Plan
    from grain_sft.demo.run import run as run_demo

    return run_demo(options.dir, Plan(DATA[options.data], options.steps, options.seed))
