"""`grain-sft demo`: train, kill, resume, compare."""

from __future__ import annotations

import argparse

from grain_sft.cli.arguments import at_least

MIN_STEPS = 9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    folder = "folder for everything it makes: new, empty, or an earlier demo's"
    parser.add_argument("--dir", default="grain_sft_demo", help=folder)
    steps = f"steps of training, {MIN_STEPS} or more (default: 48)"
    parser.add_argument("--steps", type=at_least(MIN_STEPS), default=48, help=steps)
    seed = "seed of the order of rows and of the model (default: 0)"
    parser.add_argument("--seed", type=at_least(0), default=0, help=seed)


def run(options: argparse.Namespace) -> int:
    """Run the demo: status 0 if the resumed run equals the uninterrupted one bit for bit, else 1."""
    from grain_sft.demo import run_demo

    return run_demo(options.dir, steps=options.steps, seed=options.seed)
