"""`grain-sft receipt`: a short hash of everything that decides the batches of a config, with its parts."""

from __future__ import annotations

import argparse
import json

from grain_sft.cli.arguments import add_config, open_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config(parser, host="host h of H; only order maxtext depends on the number of hosts (default: 0/1)")
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(options: argparse.Namespace) -> int:
    """Print the receipt."""
    receipt = open_config(options).receipt
    if options.json:
        print(json.dumps(receipt.as_dict(), indent=2))
    else:
        print("\n".join([receipt.code, *(f"  {name:12}{part}" for name, part in receipt.parts.items())]))
    return 0
