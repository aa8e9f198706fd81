"""Argument parser whose errors begin with the error."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that reports an error in three lines: the error, the required arguments, where help is."""

    def error(self, message: str) -> NoReturn:
        """Print the error and leave with status 2."""
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        alternatives = [action for group in groups for action in group._group_actions]
        required = [
            action for action in self._actions if action.required or not action.option_strings or action in alternatives
        ]
        usage = self._get_formatter()
        usage.add_usage(None, [action for action in required if action.help is not argparse.SUPPRESS], groups, "")
        line = " ".join(usage.format_help().split())
        self.exit(2, f"{self.prog}: error: {message}\nusage: {line} [options]\n{self.prog} --help lists all options.\n")
