"""Types of command line arguments; what doesn't fit is argparse's usage error, status 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from grain_sft.errors import PrepareError, SamplerError

if TYPE_CHECKING:
    from grain_sft.sampling import Host


def at_least(least: int) -> Callable[[str], int]:
    """An integer from `least` on."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected an integer, {least} or more.")
        return value

    return integer


def positive(text: str) -> float:
    """A number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0.")
    return value


def pair(text: str) -> tuple[str, str]:
    """`FROM=TO`."""
    old, found, new = text.partition("=")
    if not found or not old:
        raise argparse.ArgumentTypeError(f"{text!r}: expected FROM=TO.")
    return old, new


def add_schema_argument(parser: argparse.ArgumentParser) -> None:
    """Declare `--schema`."""
    from grain_sft.prepare import SCHEMAS

    parser.add_argument(
        "--schema",
        type=_schema,
        default="auto",
        metavar="NAME[:KEY=KEY,...]",
        help=f"of the records: {', '.join(SCHEMAS)}; after a colon, keys that have other names in the file, as in "
        "prompt_completion:prompt=question,completion=answer (default: auto, by the keys of each record)",
    )


def _schema(text: str) -> str:
    """A schema's name, and a mapping of its keys."""
    from grain_sft.prepare.schema import check_schema

    try:
        check_schema(text)
    except PrepareError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def share(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a share from 0 up to, not including, 1.")
    return value


def host_of(text: str) -> Host:
    """`h/H`: host h of H."""
    from grain_sft.sampling import Host  # with it comes all of Grain

    index, found, count = text.partition("/")
    try:
        if found:
            return Host(int(index), int(count))
    except (ValueError, SamplerError):
        pass
    raise argparse.ArgumentTypeError(f"{text!r}: expected h/H, host h (from 0) of H.")
