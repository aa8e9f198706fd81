"""`python -m grain_sft COMMAND ...`: the command line, where `grain-sft` is not on the path."""

from __future__ import annotations

from grain_sft.cli.main import console

if __name__ == "__main__":  # worker processes import this file too
    console()
