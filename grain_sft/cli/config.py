"""`grain-sft config`: print a config with what it inherits, or the JSON Schema of configs."""

from __future__ import annotations

import argparse
import json
import sys

from grain_sft.config import config_schema, stated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("config", nargs="?", metavar="CONFIG", help="print this config, checked, with what it inherits")
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of configs, for editors")


def run(options: argparse.Namespace) -> int:
    """Print the config or the schema."""
    found = config_schema() if options.schema else stated(options.config)[1]
    json.dump(found, sys.stdout, indent=2)
    print()
    return 0
