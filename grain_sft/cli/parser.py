"""Argument parser whose errors begin with the error."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that reports an error in three lines: the error, the required arguments, where help is."""

    def error(self, message: str) -> NoReturn:
        """Print the error and leave with status 2."""
        required = [action for action in self._actions if action.required or not action.option_strings]
        usage = self._get_formatter()
        usage.add_usage(None, [action for action in required if action.help is not argparse.SUPPRESS], [], "")
        line = " ".join(usage.format_help().split())
        self.exit(2, f"{self.prog}: error: {message}\nusage: {line} [options]\n{self.prog} --help lists all options.\n")
