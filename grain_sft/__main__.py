"""`python -m grain_sft COMMAND ...`: the command line, where `grain-sft` is not on the path."""

from grain_sft.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main.console()
