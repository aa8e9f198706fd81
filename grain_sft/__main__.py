"""`python -m grain_sft COMMAND ...`, for shells that don't find `grain-sft`."""

from grain_sft.cli import main

if __name__ == "__main__":  # worker processes import this file too
    main.console()
