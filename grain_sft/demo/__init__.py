"""`grain-sft demo`: train on this machine's own text, kill the process, resume from a step number, and compare.

`run` makes the corpus (`corpus`), trains in other processes (`train`), and compares their records.
"""

from grain_sft.demo.corpus import Entry, docstrings
from grain_sft.demo.run import run_demo

__all__ = ["Entry", "docstrings", "run_demo"]
