"""`grain-sft demo`: train a model, kill the process, resume from a step number, and compare with a run without the kill.

Module `run` makes the corpus with module `corpus`. It runs module `train` in other processes, and compares their records.
"""

from grain_sft.demo.corpus import docstrings
from grain_sft.demo.run import run_demo

__all__ = ["docstrings", "run_demo"]
