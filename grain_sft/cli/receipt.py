"""`grain-sft receipt`: a short hash of everything that decides the batches of a config, with its parts."""

from __future__ import annotations

import argparse
import json

from grain_sft.cli.arguments import add_config, host_of
from grain_sft.config import load
from grain_sft.progress import elapsed
from grain_sft.sampling import Host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config(parser)
    parser.add_argument("--json", action="store_true", help="print as JSON")
    parser.add_argument(
        "--host",
        type=host_of,
        default=Host(0, 1),
        metavar="h/H",
        help="host h of H; only order maxtext depends on the number of hosts (default: 0/1)",
    )


def run(options: argparse.Namespace) -> int:
    """Print the receipt."""
    with elapsed("Opening"):
        receipt = load(options.config, host=options.host).receipt
    if options.json:
        print(json.dumps(receipt.as_dict(), indent=2))
        return 0
    print(receipt.code)
    for name, part in receipt.parts.items():
        print(f"  {name:12}{part}")
    return 0
