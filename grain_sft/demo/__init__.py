"""`grain-sft demo`: train a model, kill the process, resume from a step number, and compare with a run without the kill.

The text is Python's own documentation on this machine. Module `run` makes the corpus by module `corpus`, trains in other
processes by module `train`, and compares the records of these processes.
"""

from grain_sft.demo.corpus import Entry, docstrings
from grain_sft.demo.run import run_demo

__all__ = ["Entry", "docstrings", "run_demo"]
