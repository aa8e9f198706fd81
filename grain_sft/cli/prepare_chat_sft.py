"""`grain-sft prepare-chat-sft`: an episode-indexed dataset, by the options of `prepare_chat_sft.py`."""

from __future__ import annotations

import argparse

from grain_sft.cli import episodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    episodes.add_arguments(parser)


def run(options: argparse.Namespace) -> int:
    """Prepare it."""
    return episodes.run(options, "episode")
